"""A training step on given completions with nanogrpo, as in train.py, and with TRL.

In: a checkpoint folder, options, and the random completions of a `Case`. Out: three objects,
`Ours`, `Trl` and `TrlAsync`, each with a method `step(samples)`. A step includes everything from
the samples to the new weights. The method returns the gradient norm, so that a benchmark can check
that the trainers agree. Read next: step_time.py (small models on a CPU), step_large.py (real sizes
on a GPU), step_memory.py.
"""

from __future__ import annotations

import dataclasses
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.rewards import share_of_even
from bench.rollout_speed import uneven_lengths
from nanogrpo import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import World
from nanogrpo.extras import two_calls  # noqa: F401 (adds backends of attention)
from nanogrpo.extras.sharding import Sharded, shard
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import packing, schedule
from nanogrpo.grpo.advantages import step_advantages
from nanogrpo.logs import metrics
from nanogrpo.model import checkpoint
from nanogrpo.model.gpu_attention import varlen_function
from nanogrpo.run import optim
from nanogrpo.run.setup import load_weights
from nanogrpo.types import PackedBatch, Prompt, Sample

SOLO = World(0, 1, torch.device("cpu"))  # one process


@dataclasses.dataclass(frozen=True)
class Case:
    P: int  # prompts
    G: int  # completions per prompt
    prompt: int  # tokens
    longest: int  # maximum number of tokens per completion
    # if True, all completions have `longest` tokens; if False, a third of `longest` on average
    even: bool = False
    vocab: int = 104  # number of ids; only the first 104 have a token in the tokenizer


def make_samples(case: Case, prompt: int, longest: int) -> list[Sample]:
    """Return random samples for the case, with completions of these lengths. Each group contains
    both rewards. If all rewards of a group were equal, the group would have no gradient. nanogrpo
    would then leave out the group, but TRL would not.
    """
    rng, count = random.Random(0), case.P * case.G
    lengths = [longest] * count if case.even else uneven_lengths(count, longest)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(case.vocab) for _ in range(n)]

    prompts = [Prompt(i, f"{i}", tokens(prompt)) for i in range(case.P)]
    samples = []
    for i, n in enumerate(lengths):
        sample = Sample(prompts[i // case.G], i % case.G, tokens(n), [-7.0] * n, True, [0] * n)
        sample.reward = float(i % case.G < case.G // 2)
        samples.append(sample)
    return samples


def options_of(
    case: Case, scale: float = 1.0, device: str = "cpu", **options
) -> tuple[Config, list[Sample]]:
    """Return the options and the samples for a step of the case, with all lengths times `scale`."""
    prompt, longest = (max(2, round(n * scale)) for n in (case.prompt, case.longest))
    samples = make_samples(case, prompt, longest)
    cfg = Config(
        num_generations=case.G,
        generation_batch_size=len(samples),
        max_completion_length=longest,
        learning_rate=1e-6,
        max_steps=1,
        device=device,
        **options,
    )
    for s, a in zip(samples, step_advantages([s.reward for s in samples], cfg)[0]):
        s.advantage = a
    return cfg, samples


def strips(
    samples: list[Sample], cfg: Config, pair_cost: float, device: torch.device | str = "cpu"
) -> Sequence[PackedBatch]:
    """Return the micro-batches of a step of nanogrpo, which are built when they are first used."""
    (update,) = schedule.schedule([s.facts for s in samples], cfg, 0, pair_cost=pair_cost)
    return packing.pack(update, samples, cfg, device=device)


class Ours:
    """nanogrpo's side. The model is wrapped with FSDP2 as in a run, and a step is the inner loop of
    train.py.
    """

    def __init__(self, folder: Path, cfg: Config, world: World = SOLO):
        model = checkpoint.empty_model(folder)
        features = [Sharded(cfg)]
        inputs: Any = SimpleNamespace(cfg=cfg, world=world, source=folder, features=features)
        shard(model, cfg, world)
        self.model = load_weights(model, inputs)
        self.optimizer = optim.make_optimizer(self.model, cfg)
        self.cfg, self.world, self.clock = cfg, world, metrics.Clock(world.device)

    def step(self, samples: list[Sample]) -> float:
        """Train one step; return the norm of the gradient."""
        with self.clock("pack"):
            batches = strips(samples, self.cfg, self.model.cfg.pair_cost, self.world.device)
            self.micro = len(batches)
        for i in range(self.micro):
            with self.clock("pack"):  # while a GPU trains on the previous strip
                batch = batches[i]
            with self.clock("forward"):  # also computes the gradients of the head
                loss = self.model.forward_strip(batch, grpo.objective(batch, self.cfg)).loss
            with self.clock("backward"):
                fsdp.backward(self.model, loss, self.world, last=i == self.micro - 1)
        with self.clock("optimizer"):
            return optim.clip_and_step(
                self.model, self.optimizer, self.cfg.learning_rate, self.cfg.max_grad_norm
            )

    def computed(self, samples: list[Sample]) -> int:
        """Return the number of tokens that the decoder computes."""
        batches = strips(samples, self.cfg, self.model.cfg.pair_cost)
        return sum(len(batch.tokens) for batch in batches)


def padded_width(samples: list[Sample]) -> int:
    """Return the tokens per row of TRL's batch: the longest prompt plus the longest completion."""
    prompt = max(len(s.prompt.token_ids) for s in samples)
    return prompt + max(len(s.token_ids) for s in samples)


class Trl:
    """TRL's trainer on the same completions: its batch layout, `_compute_loss` and optimizer."""

    def __init__(self, folder: Path, cfg: Config, micro: int = 1):
        from bench import trl_run

        cfg = dataclasses.replace(cfg, model=str(folder))
        # the trainer requires a dataset but draws nothing from it here
        prompts = [Prompt(i, "0", [0]) for i in range(cfg.prompts_per_step)]
        output = Path(tempfile.mkdtemp())
        trainer = trl_run.trainer(cfg, prompts, [share_of_even], output, micro)
        self.prepare(trainer, micro, cfg)
        self.micro = micro

    def prepare(self, trainer: Any, accumulation: int, cfg: Config) -> None:
        """Do what `Trainer.train`, which is not called here, would do before the first step."""
        self.trainer = trainer
        trainer.create_optimizer()
        if cfg.checkpointing != "none":
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer.current_gradient_accumulation_steps = accumulation
        self.clock = metrics.Clock(trainer.accelerator.device)

    def batch(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        """Return TRL's batch. As in TRL, all samples of a generation are padded to the longest."""
        pad_id = self.trainer.processing_class.pad_token_id

        def pad(ids: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
            rows = [torch.tensor(row) for row in ids]
            padded, mask = (
                torch.nn.utils.rnn.pad_sequence(values, True, fill, padding_side=side)
                for values, fill in ((rows, pad_id), ([torch.ones_like(r) for r in rows], 0))
            )
            return padded, mask

        prompt_ids, prompt_mask = pad([s.prompt.token_ids for s in samples], "left")
        completion_ids, completion_mask = pad([s.token_ids for s in samples], "right")
        inputs = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": torch.tensor([s.advantage for s in samples]),
            "num_items_in_batch": completion_mask.sum(),
        }
        return {name: x.to(self.trainer.accelerator.device) for name, x in inputs.items()}

    def step(self, samples: list[Sample]) -> float:
        """Train one step; return the norm of the gradient."""
        model = self.trainer.model.train()
        with self.clock("pack"):
            inputs = self.batch(samples)
        size = len(samples) // self.micro
        for start in range(0, len(samples), size):
            part = {name: x[start : start + size] if x.ndim else x for name, x in inputs.items()}
            with self.clock("forward"):
                loss = self.trainer._compute_loss(model, part)
            with self.clock("backward"):
                loss.backward()
        return self.update()

    def update(self) -> float:
        """Change the weights; return the norm of the gradient."""
        with self.clock("optimizer"):
            norm = torch.nn.utils.clip_grad_norm_(self.trainer.model.parameters(), 1.0)
            self.trainer.optimizer.step()
            self.trainer.optimizer.zero_grad()
            return norm.item()

    def computed(self, samples: list[Sample]) -> int:
        """Return the number of tokens that the decoder computes, padding included."""
        return len(samples) * padded_width(samples)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    softmax_scale: float | None = None,
    **_: Any,
) -> Tensor:
    """Attend within each segment, as FlashAttention 3 does in TRL. A segment's queries [n] are the
    last n positions of its keys [m]. Shapes: query [T, H, E], key and value [T', K, E]. On a GPU,
    this calls the same function as nanogrpo: FlashAttention 2 or, with NANOGRPO_ATTENTION=flash4,
    FlashAttention 4.
    """
    if query.is_cuda:
        if os.environ.get("NANOGRPO_ATTENTION") == "flash4":
            from flash_attn.cute import flash_attn_varlen_func

            return flash_attn_varlen_func(
                query,
                key,
                value,
                cu_seqlens_q=starts,
                cu_seqlens_k=key_starts,
                max_seqlen_q=longest,
                max_seqlen_k=longest_key,
                causal=True,
                softmax_scale=softmax_scale,
            )
        bounds = starts, key_starts, longest, longest_key
        return varlen_function()(
            query, key, value, *bounds, window_size=(-1, 0), scale=softmax_scale
        )
    lengths, key_lengths = starts.diff().tolist(), key_starts.diff().tolist()
    out = []
    for q, k, v in zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths)):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, n, E], [1, K, m, E]
        mask = causal_lower_right(q.shape[2], k.shape[2])
        y = scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True)
        out.append(y[0])
    return torch.cat(out, dim=1).transpose(0, 1)  # [T, H, E]


class TrlAsync(Trl):
    """TRL's AsyncGRPOTrainer on the same completions: its packing, `compute_loss` and optimizer.
    The packing needs no padding, and computes a prompt only once for its group.

    TRL's attention would download FlashAttention 3, so `varlen_attention` replaces it. A row has at
    most as many tokens as a strip of nanogrpo. TRL computes the mean over the tokens of each row,
    and then the mean over rows. Here, the sum of each row is divided by the number of tokens in all
    rows, so that the gradient is the same as nanogrpo's. The loss needs the log-probs of the
    completions, which are computed before the first step.
    """

    def __init__(self, folder: Path, cfg: Config):
        import datasets
        from trl.experimental.async_grpo import async_grpo_trainer as theirs
        from trl.experimental.async_grpo import packing

        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
        theirs.get_peak_flops_per_device = lambda *_: None  # asks for the GPU's name
        args = theirs.AsyncGRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=cfg.device == "cpu",
            bf16=cfg.device != "cpu",
            dtype="float32",
            gradient_checkpointing=False,
            report_to="none",
            learning_rate=cfg.learning_rate,
            max_steps=1,
        )
        nothing: Any = SimpleNamespace(rollout_buffer=None)
        trainer = theirs.AsyncGRPOTrainer(
            f"{folder}",
            args=args,
            train_dataset=datasets.Dataset.from_list([{"prompt": "0"}]),
            rollout_worker=nothing,
            weight_transfer=nothing,
        )
        self.prepare(trainer, 1, cfg)
        self.collate = theirs.DataCollatorForRollout(0)
        self.row, self.budget = packing.TreeRow, cfg.strip_tokens
        self.logp: list[Tensor] = []

    def rows(self, samples: list[Sample]) -> list[Any]:
        """Return TRL's rows, which are its micro-batches."""
        rows = [self.row()]
        for s in samples:
            prompt, ids = s.prompt.token_ids, s.token_ids
            example = {
                "input_ids": torch.tensor([*prompt, *ids]),
                "completion_mask": torch.tensor([0] * len(prompt) + [1] * len(ids)),
                "old_log_probs": torch.zeros(len(prompt) + len(ids)),
                "advantage": s.advantage,
                "group_id": s.prompt.id,
                "metrics": {},
            }
            if not rows[-1].fits(example, self.budget):
                rows.append(self.row())
            rows[-1].add(example)
        return rows

    def batches(self, samples: list[Sample]) -> list[dict[str, Tensor]]:
        tokens = torch.tensor([float(sum(len(s.token_ids) for s in samples))])
        found = [self.collate([[row]]) | {"global_n_tokens": tokens} for row in self.rows(samples)]
        device = self.trainer.accelerator.device
        return [{name: x.to(device) for name, x in inputs.items()} for inputs in found]

    def step(self, samples: list[Sample]) -> float:
        """Train one step; return the norm of the gradient."""
        model = self.trainer.model.train()
        self.logp = self.logp or [self.scores(model, x) for x in self.batches(samples)]
        with self.clock("pack"):
            batches = self.batches(samples)
        self.micro = len(batches)
        for inputs, logp in zip(batches, self.logp):
            with self.clock("forward"), self.trainer.accelerator.autocast():
                loss = self.trainer.compute_loss(model, inputs | {"old_log_probs": logp})
            with self.clock("backward"):
                loss.backward()
        return self.update()

    @torch.no_grad()
    def scores(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Return the log-probs [1, M] of the completions' tokens."""
        tree = {name: x[0] for name, x in inputs.items() if name.startswith("tree_")}
        queries, keys = tree.pop("tree_max_seqlens").tolist()
        with self.trainer.accelerator.autocast():
            out = model(
                **{n: inputs[n] for n in ("input_ids", "position_ids", "shift_labels")},
                fused_lm_head=True,
                tree_max_seqlen_q=queries,
                tree_max_seqlen_k=keys,
                **tree,
            )
        return out.log_probs.flatten()[inputs["token_index"]]

    def computed(self, samples: list[Sample]) -> int:
        """Return the number of tokens that the decoder computes."""
        return sum(len(row.tokens) for row in self.rows(samples))


def check_norms(case: str, norms: dict[str, float], tolerance: float = 1e-3) -> None:
    """Raise RuntimeError if the gradient norms differ, since the sides then compute different
    gradients.
    """
    first = next(iter(norms.values()))
    if any(abs(norm - first) > tolerance * first for norm in norms.values()):
        raise RuntimeError(f"{case}: the gradient norms differ: {norms}")
