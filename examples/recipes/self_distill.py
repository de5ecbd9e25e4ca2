"""Self-distillation: the teacher is the model itself, with a hint in its prompt.

    python examples/recipes/self_distill.py --model M --data D --hint-column solution …

The policy π answers the prompt x. The teacher has the same weights, but also reads a hint h, such
as the reference answer, a worked solution or the feedback on an earlier attempt. It judges each
token of the answer. So the model learns to answer without the hint, and no other model is needed:

    A_t = reward_coef · A_group - hint_coef · (log π(y_t | x, y_<t) - log π(y_t | x, h, y_<t))

With `reward_coef` 0, the default, the loss is the reverse KL between policy and teacher, on samples
of the policy. SDPO (Hübotter et al. 2026, 2601.20802) and SDFT (Shenfeld et al. 2026, 2601.19897)
use this loss. In SDFT, h is a demonstration. A test compares the gradient of this loss with TRL's
gradient. The teacher has the policy's weights at the start of the step. If the hint column of a
prompt is empty, the prompt has no teacher.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from nanogrpo import Config
from nanogrpo.config import option
from nanogrpo.errors import UserError
from nanogrpo.extras.recipe import main
from nanogrpo.feature import Feature
from nanogrpo.grpo import packing
from nanogrpo.grpo.schedule import Piece, Update
from nanogrpo.step import logp
from nanogrpo.types import Prompt, Sample


@dataclass(frozen=True)
class Options(Config):
    hint_column: str = option("", "column with the hint", required="name a column of the data")
    hint_template: str = option("{prompt}\n\nHint: {hint}", "the teacher's last message")
    hint_coef: float = option(1.0, "factor of the divergence from the teacher", "> 0")
    reward_coef: float = option(0.0, "factor of the rewards' advantages", ">= 0")

    def problems(self):
        if self.tools or self.environment_factory or self.rollout:
            yield "the teacher reads no output of tools: leave out --tools and --rollout."


class SelfDistill(Feature):
    all_gradients = True  # a completion whose advantage is 0 has a gradient, too

    def __init__(self, cfg):
        self.cfg = cfg

    def encode(self, prompt, variables, folder, tokenize):
        """Set `prompt.hinted`, the token ids of the prompt with its hint."""
        plain, hint = prompt.text, prompt.columns.get(self.cfg.hint_column)
        if hint:
            *before, last = [{"content": plain}] if isinstance(plain, str) else plain
            text = self.cfg.hint_template.format(prompt=last["content"], hint=hint)
            prompt.text = text if isinstance(plain, str) else [*before, {**last, "content": text}]
        prompt.hinted, prompt.text = tokenize(), plain

    def model(self, model, inputs):
        if hasattr(model.model, "visual"):
            raise UserError("the teacher reads no pictures: use a --model without them.")
        column, room = self.cfg.hint_column, model.cfg.max_position_embeddings
        room -= self.cfg.max_completion_length
        if not any(column in prompt.columns for prompt in inputs.prompts):
            raise UserError(f"--hint-column {column}: the data has no such column.")
        if any(len(prompt.hinted) > room for prompt in inputs.prompts):
            raise UserError(f"--hint-column {column}: some hints exceed the context: cut them.")

    def scored(self, run, samples, step):
        """Collect the hinted prompts on every rank, because samples may move between ranks."""
        self.hinted = run.world.concat([sample.prompt.hinted for sample in samples])

    def batches(self, run, batches):
        for batch in batches:
            ids, counts = batch.sample.unique_consecutive(return_counts=True)
            texts = zip(ids.tolist(), batch.targets.split(counts.tolist()))
            samples = {
                i: Sample(Prompt(i, "", self.hinted[i]), 0, y.tolist(), [0.0] * len(y), True, [])
                for i, y in texts
            }
            update = Update(ids, 1, [[[Piece([i], 0, 0, 0) for i in samples]]])
            (hinted,) = packing.pack(update, samples, self.cfg, device=run.world.device)
            hinted.head = batch.head
            gap = logp(run.model, hinted, self.cfg) - logp(run.model, batch, self.cfg)  # [M]
            batch.advantage = self.cfg.reward_coef * batch.advantage + self.cfg.hint_coef * gap


def features(cfg):
    return [SelfDistill(cfg)]


if __name__ == "__main__":
    sys.exit(main(Options, features))
