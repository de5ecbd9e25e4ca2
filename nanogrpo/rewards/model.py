"""A reward model: a Qwen3 or Qwen2 with one number in place of the vocabulary, as Hugging Face's
...ForSequenceClassification.

In: a folder or hub id whose config.json has one label, and texts. Out: one reward a sample: the
score of its last token, after prompt and completion. `--reward-funcs model:FOLDER`. Every rank
holds the model whole and judges its own samples. Read next: model.py (the decoder),
reward_runner.py (which calls this as it calls any function).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn

from nanogrpo.errors import UserError, read_json
from nanogrpo.model import checkpoint
from nanogrpo.model.attention import Packed
from nanogrpo.model.decoder import Body
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.model.tokenizer import Tokenizer

BUDGET = 16384  # tokens in a strip: as many texts as fit, or one


class RewardModel(nn.Module):
    """Called as a reward function: `model(prompts=…, completions=…)` → B floats.

    The text is TRL's: messages go through the model's own chat template, prompt and answer together
    and without the opening of another turn; plain texts are laid end to end.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.model = Body(cfg)
        self.score = nn.Linear(cfg.hidden_size, 1, bias=False)
        self.tokenizer: Tokenizer | None = None
        self.pad_token_id: int | None = None

    @classmethod
    def load(cls, name: str, device: torch.device | str = "cpu") -> RewardModel:
        """From a folder or hub id; bfloat16 on a GPU, else float32. UserError if it is no reward
        model that we compute.
        """
        folder = checkpoint.locate(name, "--reward-funcs model:")
        where = folder / "config.json"
        raw = read_json(where)
        # transformers leaves its default of two out
        labels = raw.get("id2label") or {"0": "", "1": ""}
        kind = (raw.get("architectures") or [""])[0]
        if not str(kind).endswith("ForSequenceClassification") or len(labels) != 1:
            raise UserError(
                f"{where}: a reward model is a ...ForSequenceClassification with one label, but this is a {kind} with "
                f"{len(labels)}: name another folder after model:."
            )
        # there is no head to tie
        cfg = dataclasses.replace(ModelConfig.from_dict(raw, str(where)), tie_word_embeddings=False)
        with torch.device("meta"):
            model = cls(cfg)
        device = torch.device(device)
        model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to_empty(device=device)
        checkpoint.load_weights(model, folder)
        model.tokenizer, model.pad_token_id = (
            Tokenizer(folder),
            raw.get("pad_token_id"),
        )
        model.__name__ = Path(name).name  # in logs: rewards/<name>/mean, as TRL has it
        return model.requires_grad_(False)

    @torch.no_grad()
    def forward(self, prompts: list, completions: list, **kwargs) -> list[float]:
        texts = [self._ids(prompt, completion) for prompt, completion in zip(prompts, completions)]
        scores: list[float] = [0.0] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        while order:
            strip = [order.pop()]
            total = len(texts[strip[0]])
            while order and total + len(texts[order[-1]]) <= BUDGET:
                strip.append(order.pop())
                total += len(texts[strip[-1]])
            for i, score in zip(strip, self.score_texts([texts[i] for i in strip]).tolist()):
                scores[i] = score
        return scores

    def score_texts(self, texts: list[list[int]]) -> Tensor:
        """Token ids of N texts → the score of each one's last token, [N] float32."""
        device = self.score.weight.device
        tokens = torch.tensor([i for ids in texts for i in ids], device=device)  # [T]
        positions = torch.cat([torch.arange(len(ids)) for ids in texts]).to(device)  # [T]
        cu_seqlens = torch.tensor([0, *map(len, texts)]).cumsum(0).to(device, torch.int32)  # [N+1]
        hidden = self.model(tokens, positions, Packed(cu_seqlens, max(map(len, texts))))  # [T, D]
        last = torch.tensor([self._last(ids) for ids in texts], device=device)  # [N]
        return self.score(hidden[cu_seqlens[:-1] + last]).squeeze(-1).float()

    def _last(self, ids: list[int]) -> int:
        """The position of the last token that is not padding: transformers' rule, also for a text
        that ends with that token.
        """
        return max(
            (i for i, token in enumerate(ids) if token != self.pad_token_id), default=len(ids) - 1
        )

    def _ids(self, prompt: str | list[dict], completion: str | list[dict]) -> list[int]:
        together = prompt + completion
        text = (
            together
            if isinstance(together, str)
            else self.tokenizer.render(together, add_generation_prompt=False)
        )
        ids = self.tokenizer.encode(text)
        if not 0 < len(ids) <= self.cfg.max_position_embeddings:
            raise UserError(
                f"the reward model {self.__name__} cannot judge a text of {len(ids)} tokens (its context holds "
                f"{self.cfg.max_position_embeddings}): lower --max-completion-length or --max-prompt-length, or take another."
            )
        return ids
