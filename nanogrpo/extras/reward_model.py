"""A reward model: our decoder, with a head that outputs a single score instead of logits.

In: a folder or hub id of a Hugging Face ...ForSequenceClassification model with one label, and
texts to score. Out: one reward per sample, the score at the last token of prompt and completion.
Use it with `--reward-funcs model:FOLDER`. Every rank has a full copy of the model and scores its
own samples. Read next: model/decoder.py, rewards/scorer.py (which calls this model like any other
function).
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanogrpo.errors import UserError
from nanogrpo.extras import rope_scaling, window  # noqa: F401 (for all kinds of models)
from nanogrpo.model import checkpoint
from nanogrpo.model.attention import StripAttention
from nanogrpo.model.decoder import Body, Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.model.tokenizer import Tokenizer

TOKEN_BUDGET = 16384  # tokens per forward pass: as many texts as fit, but at least one


class RewardModel(nn.Module):
    """A reward function: `model(prompts=…, completions=…)` returns B floats.

    Texts are built as in TRL. Messages are formatted by the model's own chat template: prompt and
    answer together, without a generation prompt at the end. Plain texts are concatenated.
    """

    __name__: str  # the name in logs
    tokenizer: Tokenizer
    pad_token_id: int | None = None

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.model = Body(cfg)
        self.score = nn.Linear(cfg.hidden_size, 1, bias=False)

    # These three methods, and the config, are all that `checkpoint.load_model` needs of a Decoder.
    arranged, tie = Decoder.arranged, Decoder.tie

    @classmethod
    def from_config(cls, raw: dict, where: str) -> "RewardModel":
        # with two labels, the default, transformers writes no labels into config.json
        labels = raw.get("id2label") or {"0": "", "1": ""}
        kind = (raw.get("architectures") or [""])[0]
        if not str(kind).endswith("ForSequenceClassification") or len(labels) != 1:
            raise UserError(
                f"{where}: a reward model is a ...ForSequenceClassification with one label, but "
                f"this is a {kind} (labels: {len(labels)}); give another folder as model:FOLDER"
            )
        # A reward model has no vocabulary head that could be tied to the embeddings.
        cfg = dataclasses.replace(ModelConfig.from_dict(raw, where), tie_word_embeddings=False)
        model = cls(cfg)
        model.pad_token_id = raw.get("pad_token_id")
        return model

    @classmethod
    def load(cls, name: str, device: torch.device | str = "cpu") -> "RewardModel":
        """Load a folder or hub id, in bfloat16 on a GPU and in float32 on a CPU.

        Raises UserError if the model is not a reward model, or if this class cannot load it.
        """
        folder = checkpoint.locate(name, "--reward-funcs model:")
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        model: Any = checkpoint.load_model(folder, dtype, device, cls)  # type: ignore[arg-type]
        model.tokenizer = Tokenizer(folder)
        model.__name__ = Path(name).name  # the name in the log, as in rewards/<name>/mean of TRL
        return model.requires_grad_(False)

    @torch.no_grad()
    def forward(self, prompts: list, completions: list, **kwargs) -> list[float]:
        strips: list[list[list[int]]] = []
        room = 0
        for prompt, completion in zip(prompts, completions):
            ids = self._ids(prompt + completion)
            if len(ids) > room:
                strips.append([])
                room = TOKEN_BUDGET
            strips[-1].append(ids)
            room -= len(ids)
        return [score for strip in strips for score in self.score_texts(strip).tolist()]

    def score_texts(self, texts: list[list[int]]) -> Tensor:
        """Return the score at the last token of each of N texts, [N] float32."""
        device = self.score.weight.device
        tokens = torch.tensor([i for ids in texts for i in ids], device=device)  # [T]
        positions = torch.cat([torch.arange(len(ids)) for ids in texts]).to(device)  # [T]
        cu_seqlens = torch.tensor([0, *map(len, texts)]).cumsum(0).to(device, torch.int32)  # [N+1]
        hidden = self.model(
            tokens, positions, StripAttention(cu_seqlens, max(map(len, texts)))
        )  # [T, D]
        return self.score(hidden[cu_seqlens[1:] - 1]).squeeze(-1).float()

    def _ids(self, text: str | list[dict]) -> list[int]:
        if not isinstance(text, str):
            text = self.tokenizer.render(text, add_generation_prompt=False)
        ids = self.tokenizer.encode(text)
        context = self.cfg.max_position_embeddings
        if not 0 < len(ids) <= context:
            raise UserError(
                f"the reward model {self.__name__} cannot score a text of {len(ids)} tokens (its "
                f"context is {context}); lower --max-completion-length or --max-prompt-length, or "
                "use another model"
            )
        # as in transformers, remove all padding ids at the end, even if they come from the text
        while len(ids) > 1 and ids[-1] == self.pad_token_id:
            ids.pop()
        return ids
