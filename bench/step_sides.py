"""The two sides of a training step on given completions: ours as train.py makes it, and TRL's, with
the same `step(samples)`.

In: a checkpoint folder, the options, random completions of a `Case`. Out: sides whose `step` is
everything between the samples and the new weights, and returns the gradient's norm, by which the
benches see that no side is fast by computing something else. Read next: step_time.py (small models
on a CPU), step_large.py (real sizes on a GPU), step_memory.py.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path

import torch

from bench.rollout_speed import uneven_lengths
from bench.runs import share_of_even
from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import World
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import packing
from nanogrpo.logs import metrics
from nanogrpo.model import checkpoint
from nanogrpo.run import optim
from nanogrpo.run import setup as run
from nanogrpo.types import PackedBatch, Prompt, Sample


@dataclasses.dataclass(frozen=True)
class Case:
    P: int  # prompts
    G: int  # completions of each
    prompt: int  # tokens
    longest: int  # tokens of a completion, at most
    even: bool = False  # all completions as long; else a third of it on the average
    vocab: int = 104  # the tokenizer's own; more rows belong to no token


def make_samples(
    P: int, G: int, prompt: int, longest: int, even: bool, vocab: int, seed: int = 0
) -> list[Sample]:
    rng = random.Random(seed)
    lengths = [longest] * (P * G) if even else uneven_lengths(P * G, longest, seed)
    prompts = [Prompt(i, f"{i}", [rng.randrange(vocab) for _ in range(prompt)]) for i in range(P)]
    out = []
    for i, n in enumerate(lengths):
        ids = [rng.randrange(vocab) for _ in range(n)]
        out.append(
            Sample(
                prompts[i // G],
                i % G,
                ids,
                [-7.0] * n,
                True,
                [0] * n,
                reward=float(rng.random() < 0.5),
            )
        )
    return out


def strips(samples: list[Sample], cfg: Config, pair_cost: float) -> list[PackedBatch]:
    """The micro-batches of our side's step."""
    (update,) = packing.schedule(packing.sizes(samples, cfg), cfg, 0, pair_cost=pair_cost)
    return packing.pack(update, samples, cfg)


class Ours:
    """What a run does: the weights go into the shards of the world (fsdp.py), a step is the inner
    loop of train.py.
    """

    def __init__(self, folder: Path, cfg: Config, world: World = World(0, 1, torch.device("cpu"))):  # noqa: B008 (frozen)
        self.model = run.load_sharded(checkpoint.empty_model(folder), folder, world, cfg)
        self.optimizer = optim.make_optimizer(self.model, cfg)
        self.cfg, self.world, self.clock = cfg, world, metrics.Clock()

    def step(self, samples: list[Sample]) -> float:
        """One step; returns the gradient's norm."""
        with self.clock("pack"):
            batches = [
                batch.to(self.world.device)
                for batch in strips(samples, self.cfg, self.model.cfg.pair_cost)
            ]
            self.micro = len(batches)
        for batch in batches:
            with self.clock("forward"):  # with the gradients of the head
                loss = self.model.forward_packed(batch, grpo.objective(batch, self.cfg)).loss
            with self.clock("backward"):
                fsdp.backward(self.model, loss, self.world, last=batch is batches[-1])
        with self.clock("optimizer"):
            return optim.clip_and_step(
                self.model, self.optimizer, self.cfg.learning_rate, self.cfg.max_grad_norm
            )

    def computed(self, samples: list[Sample]) -> int:
        return sum(
            len(batch.tokens) for batch in strips(samples, self.cfg, self.model.cfg.pair_cost)
        )


class Trl:
    """TRL's own trainer on the same completions: its batch layout, `_compute_loss`, its optimizer's
    step.
    """

    def __init__(self, folder: Path, cfg: Config, micro: int = 1, checkpointing: bool = False):
        from bench import trl_run

        cfg = dataclasses.replace(cfg, model=str(folder))
        # a data set that nothing is drawn from
        rows = [Prompt(i, "0", [0]) for i in range(cfg.prompts_per_step)]
        self.trainer = trl_run.trainer(cfg, rows, [share_of_even], Path(tempfile.mkdtemp()), micro)
        self.trainer.create_optimizer()
        # as Trainer.train does before its first step, when its options ask for it
        if checkpointing:
            self.trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.micro = self.trainer.current_gradient_accumulation_steps = micro
        self.pad, self.clock = self.trainer.processing_class.pad_token_id, metrics.Clock()

    def step(self, samples: list[Sample]) -> float:
        model = self.trainer.model.train()

        def pad(rows, value, side):
            return torch.nn.utils.rnn.pad_sequence(rows, True, value, padding_side=side)

        with self.clock("pack"):
            prompts = [torch.tensor(s.prompt.token_ids) for s in samples]
            completions = [torch.tensor(s.token_ids) for s in samples]
            inputs = {
                "prompt_ids": pad(prompts, self.pad, "left"),
                "prompt_mask": pad([torch.ones_like(p) for p in prompts], 0, "left"),
                "completion_ids": pad(completions, self.pad, "right"),
                "completion_mask": pad([torch.ones_like(c) for c in completions], 0, "right"),
                "advantages": torch.tensor([s.advantage for s in samples]),
                "num_items_in_batch": torch.tensor(sum(map(len, completions))),
            }
            inputs = {name: x.to(self.trainer.accelerator.device) for name, x in inputs.items()}
        rows = len(samples) // self.micro
        # padded to the longest of all, as TRL pads a generation
        for start in range(0, len(samples), rows):
            part = {name: x[start : start + rows] if x.ndim else x for name, x in inputs.items()}
            with self.clock("forward"):
                loss = self.trainer._compute_loss(model, part)
            with self.clock("backward"):
                loss.backward()
        with self.clock("optimizer"):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.trainer.optimizer.step()
            self.trainer.optimizer.zero_grad()
            return norm.item()

    def computed(self, samples: list[Sample]) -> int:
        return len(samples) * (
            max(len(s.prompt.token_ids) for s in samples) + max(len(s.token_ids) for s in samples)
        )


def options_of(
    case: Case, scale: float = 1.0, device: str = "cpu", **options
) -> tuple[Config, list[Sample]]:
    """The options and the samples of the case's step."""
    prompt, longest = (max(2, round(n * scale)) for n in (case.prompt, case.longest))
    samples = make_samples(case.P, case.G, prompt, longest, case.even, case.vocab)
    cfg = Config(
        num_generations=case.G, generation_batch_size=case.P * case.G, max_completion_length=longest
    )
    cfg = dataclasses.replace(cfg, learning_rate=1e-6, max_steps=1, device=device, **options)
    for s, a in zip(samples, grpo.step_advantages([s.reward for s in samples], cfg)[0]):
        s.advantage = a
    return cfg, samples
