"""Answer held-out problems with two checkpoints, using transformers, and write the answers side by
side.

    python examples/before_after.py BASE runs/real/checkpoint-20 runs/problems/held_out.jsonl

In: the model before training, a checkpoint, and a file of problems (word_problems.py). Out:
before_after.md next to the checkpoint, a table of the problems with both completions. The script
does not import nanogrpo. So it also shows that a checkpoint is an ordinary Hugging Face model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from word_problems import last_number


def answers(folder: Path, prompts: list[list[dict]], max_new_tokens: int) -> list[str]:
    """Return the greedy completion of each prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    out = model.generate(**batch, do_sample=False, max_new_tokens=max_new_tokens)
    completions = out[:, batch["input_ids"].shape[1] :]
    return tokenizer.batch_decode(completions, skip_special_tokens=True)


def table(records: list[dict], before: list[str], after: list[str]) -> str:
    """Return a Markdown table of the problems, in which correct answers are marked."""
    expected = [record["answer"] for record in records]
    scores = [last_number(completions, expected) for completions in (before, after)]
    right, then = (sum(map(int, each)) for each in scores)
    lines = [
        f"{right} of {len(records)} answers are right before training, {then} after it.",
        "",
        "| problem | answer | before | after |",
        "| --- | --- | --- | --- |",
    ]
    for record, old, new, *good in zip(records, before, after, *scores):
        told = [f"{'✓' if ok else '✗'} {text}" for text, ok in zip((old, new), good)]
        cells = [record["prompt"][-1]["content"], record["answer"], *told]
        lines.append(
            "| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in cells) + " |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(".\n")[0])
    parser.add_argument("before", type=Path, help="the model before training")
    parser.add_argument("after", type=Path, help="a checkpoint")
    parser.add_argument("data", type=Path, help="a .jsonl file of problems")
    parser.add_argument("--problems", type=int, default=48, help="compare on the first N problems")
    parser.add_argument("--max-completion-length", type=int, default=40)
    args = parser.parse_args(argv)
    for path in (args.before, args.after, args.data):
        if not path.exists():
            parser.error(f"{path} is missing: train first, with `make real`.")
    records = [json.loads(line) for line in args.data.read_text().splitlines()][: args.problems]
    prompts = [record["prompt"] for record in records]
    before, after = (
        answers(folder, prompts, args.max_completion_length) for folder in (args.before, args.after)
    )
    out = args.after.parent / "before_after.md"
    out.write_text(table(records, before, after))
    print(f"{out}: {out.read_text().splitlines()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
