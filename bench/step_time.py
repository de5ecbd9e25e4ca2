"""How long is a training step on given completions: ours with shared prompts, ours with copies of the prompt, and TRL's?

In: nothing: a random Qwen3 of about three million parameters and random completions are made here. Out: rows for each case,
results/step_time.json. A step is everything between the samples and the new weights: packing or padding, forward, loss, backward,
clipping, AdamW; on policy, float32. The three sides start from the same weights and must find the same gradient (its norm is
compared to 1e-3 before anything is timed), so that no side is fast by computing something else.

TRL gets its best: no gradient checkpointing, its fused head, sdpa attention, and the whole generation as one micro-batch.
"Tokens/s" counts completion tokens, which is what a step is for; "computed" counts what the decoder ran over, padding included.
Read next: nanogrpo/packing.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench import common
from bench.rollout_speed import uneven_lengths
from nanogrpo import checkpoint, grpo, optim, packing, warmup
from nanogrpo.batch import Prompt, Sample
from nanogrpo.config import Config
from nanogrpo.model import Decoder

# case → (prompts, G, prompt length, longest completion, whether the lengths are even)
CASES = {
    "even, G=8": (8, 8, 32, 64, True),
    "uneven, G=8": (8, 8, 32, 192, False),
    "uneven, G=4": (16, 4, 32, 192, False),
    "uneven, G=16": (4, 16, 32, 192, False),
    "prompt half the completion, G=8": (8, 8, 64, 128, True),
    "long prompt, uneven, G=8": (8, 8, 256, 192, False),
}


def make_samples(P: int, G: int, prompt: int, longest: int, even: bool, vocab: int, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    lengths = [longest] * (P * G) if even else uneven_lengths(P * G, longest, seed)
    prompts = [Prompt(i, f"{i}", [rng.randrange(vocab) for _ in range(prompt)]) for i in range(P)]
    out = []
    for i, n in enumerate(lengths):
        ids = [rng.randrange(vocab) for _ in range(n)]
        out.append(Sample(prompts[i // G], i % G, ids, [-7.0] * n, True, [0] * n, reward=float(rng.random() < 0.5)))
    return out


class Ours:
    def __init__(self, folder: Path, cfg: Config):
        self.model, self.cfg = checkpoint.load_model(folder), cfg
        self.optimizer = optim.make_optimizer(self.model, cfg)

    def step(self, samples: list[Sample]) -> float:
        """One step; returns the gradient's norm."""
        (update,) = packing.schedule(packing.sizes(samples, self.cfg), self.cfg, 0, pair_cost=self.model.cfg.pair_cost)
        for batch in packing.pack(update, samples, self.cfg):
            self.model.score(batch, grpo.objective(batch, self.cfg)).loss.backward()
        return optim.clip_and_step(self.model, self.optimizer, self.cfg.learning_rate, self.cfg.max_grad_norm)

    def computed(self, samples: list[Sample]) -> int:
        return sum(len(b.tokens) for b in packing.pack(packing.one_update(samples, self.cfg), samples, self.cfg))


class Trl:
    """TRL's own trainer on the same completions: its batch layout, `_compute_loss`, its optimizer's step."""

    def __init__(self, folder: Path, cfg: Config):
        import datasets
        import transformers
        import trl

        args = trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            report_to="none",
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=cfg.generation_batch_size,
            num_generations=cfg.num_generations,
            max_completion_length=cfg.max_completion_length,
            gradient_checkpointing=False,
            learning_rate=cfg.learning_rate,
            loss_type=cfg.loss_type,
            model_init_kwargs={"attn_implementation": "sdpa", "dtype": torch.float32},
        )
        rows = datasets.Dataset.from_list([{"prompt": "0"}] * cfg.generation_batch_size)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.trainer = trl.GRPOTrainer(
            str(folder),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=args,
            train_dataset=rows,
            processing_class=tokenizer,
        )
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = 1
        self.pad = tokenizer.pad_token_id

    def step(self, samples: list[Sample]) -> float:
        model = self.trainer.model.train()
        prompts = [torch.tensor(s.prompt.token_ids) for s in samples]
        completions = [torch.tensor(s.token_ids) for s in samples]
        pad = lambda rows, value, side: torch.nn.utils.rnn.pad_sequence(rows, True, value, padding_side=side)  # noqa: E731
        inputs = {
            "prompt_ids": pad(prompts, self.pad, "left"),
            "prompt_mask": pad([torch.ones_like(p) for p in prompts], 0, "left"),
            "completion_ids": pad(completions, self.pad, "right"),
            "completion_mask": pad([torch.ones_like(c) for c in completions], 0, "right"),
            "advantages": torch.tensor([s.advantage for s in samples]),
            "num_items_in_batch": torch.tensor(sum(map(len, completions))),
        }
        self.trainer._compute_loss(model, inputs).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()
        return norm.item()

    def computed(self, samples: list[Sample]) -> int:
        return len(samples) * (max(len(s.prompt.token_ids) for s in samples) + max(len(s.token_ids) for s in samples))


def sides_of(folder: Path, cfg: Config, with_trl: bool) -> dict[str, Ours | Trl]:
    sides: dict[str, Ours | Trl] = {
        "nanogrpo": Ours(folder, cfg),
        "nanogrpo, prompts copied": Ours(folder, dataclasses.replace(cfg, share_prompts=False)),
    }
    return sides | ({"TRL": Trl(folder, cfg)} if with_trl else {})


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(prog="python -m bench.step_time", description=__doc__.split("\n\n")[0])
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each side, interleaved (default 5)")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE", help="some of the cases")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model (default 256)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    parser.add_argument("--scale", type=float, default=1.0, help="scales all lengths (a quick check: 0.2)")
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder for the JSON rows (default bench/results)")
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    rows, lines = [], []
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        tokenizer = warmup.write_tokenizer(folder)
        shape = common.small_qwen3(args.hidden, args.layers, tokenizer.vocab_size, 1024)
        model = Decoder(shape)
        checkpoint.export(model, folder, tokenizer)
        for case in args.cases:
            P, G, prompt, longest, even = CASES[case]
            prompt, longest = (max(2, round(n * args.scale)) for n in (prompt, longest))
            samples = make_samples(P, G, prompt, longest, even, shape.vocab_size)
            cfg = Config(num_generations=G, generation_batch_size=P * G, max_completion_length=longest, learning_rate=1e-6)
            for s, a in zip(samples, grpo.step_advantages([s.reward for s in samples], cfg)[0]):
                s.advantage = a
            sides = sides_of(folder, cfg, not args.no_trl)
            norms = {name: side.step(samples) for name, side in sides.items()}
            expected = norms["nanogrpo"]
            for name, norm in norms.items():
                if abs(norm - expected) > 1e-3 * expected:
                    raise RuntimeError(f"{case}: the gradient's norm is {norm} for {name} and {expected} for nanogrpo")
            steps: dict[str, Callable] = {n: lambda side=s: side.step(samples) for n, s in sides.items()}  # noqa: B023
            timings = common.interleave(steps, args.repeats, title=case)
            useful = sum(len(s.token_ids) for s in samples)
            for name, t in timings.items():
                figures = {
                    "completion_tokens": useful,
                    "tokens_per_second": useful / t.median,
                    "computed_tokens": sides[name].computed(samples),
                    "speedup_over_trl": timings["TRL"].median / t.median if "TRL" in timings else None,
                    "gradient_norm": norms[name],
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "model": dataclasses.asdict(shape),
                }
                rows.append(common.row("step_time", case, name, t, [] if argv is None else argv, **figures))
                faster = f"{figures['speedup_over_trl']:.2f}×" if figures["speedup_over_trl"] else "-"
                lines.append((case, name, t.median, figures["tokens_per_second"], figures["computed_tokens"], faster))
    path = common.write("step_time", rows, args.out)
    title = f"a training step, {rows[0]['parameters'] / 1e6:.1f} M parameters, {args.threads} threads"
    common.table(title, ("case", "side", "seconds", "tokens/s", "computed", "over TRL"), lines)
    print(f"rows: {path}")
    return rows


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
