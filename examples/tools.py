"""A model learns to call a tool. The model can guess a product or ask the calculator.

    python examples/tools.py runs/tools               # makes data, and a model that usually guesses
    python train.py --model runs/tools/base --data runs/tools/train.jsonl \\
        --tools examples/tools.py:multiply --reward-funcs accuracy --output-dir runs/tools/run \\
        --max-completion-length 32 --learning-rate 3e-4 --max-steps 20 --eval-steps 5 \\
        --eval-data runs/tools/test.jsonl

The model has 0.3 million parameters and a chat template for tools. The model knows how to call the
calculator, but usually writes a guess, which is wrong. With GRPO, the model soon calls the
calculator for every product (`tools/call_frequency` in the log).

With a real model, you do not need `make_base`, only a function like `multiply`. The class
`Calculator` provides the same tool as an environment: replace `--tools …` with
`--environment-factory examples/tools.py:Calculator`, and `accuracy` with `environment`. Read next:
docs/tools.md.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import tokenizers
import torch

from nanogrpo import Config
from nanogrpo.errors import read_json
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.extras.tools.calls import ToolCalls
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import Prompt, Sample


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return int(a) * int(b)


class Calculator:
    """The calculator as an environment that remembers the results within a completion."""

    def reset(self, answer: str, **row) -> None:
        """Start a new completion. The arguments are the fields of the record."""
        self.answer, self.results = answer, []

    def multiply(self, a: int, b: int) -> int:
        """Multiply two whole numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.results.append(multiply(a, b))
        return self.results[-1]

    def get_reward(self) -> float:
        """Return 1 if the last result is the answer, minus 0.1 for each earlier call."""
        found = [str(result) for result in self.results[-1:]] == [self.answer]
        return found - 0.1 * max(len(self.results) - 1, 0)


# --- a small model that can call tools ---

# Each constant part of a call is a single token, so that completions are short.
CALL = ['<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>"]
TEMPLATE = """
{%- for tool in tools or [] %}{{ '<|tools|>' + tool.function.name }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|tool|>' + m.content }}
{%- else %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{%- if m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def make_base(folder: Path, steps: int = 120, seed: int = 0) -> None:
    """Train a model on synthetic conversations. In the last 30 % of the steps, most answers in the
    training data are guesses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    tokenizer = write_tokenizer(folder)
    model = warmup.new_model(tokenizer)
    tools, rng = ToolCalls(Config(), tokenizer, [multiply]), random.Random(seed)

    def conversations(step: int) -> list[Sample]:
        calls = 0.25 if step > 0.7 * steps else 1.0  # at first, every answer calls the tool
        return [conversation(i, tools, rng, calls) for i in range(64)]

    warmup.imitate(model, conversations, steps, rise=20)
    checkpoint.export(model, folder, tokenizer)


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write the tokenizer of the built-in task, with additional tokens and a chat template for
    tools.
    """
    warmup.write_tokenizer(folder)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["<|tools|>", "<|tool|>"])
    inner.add_tokens([*CALL, "multiply"])
    inner.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    checkpoint.write_json(file, read_json(file) | {"chat_template": TEMPLATE})
    return Tokenizer(folder)


def conversation(number: int, tools: ToolCalls, rng: random.Random, calls: float) -> Sample:
    """Return a question and its answer as a `Sample` with advantage 1."""
    encode, record = tools.tokenizer.encode, question(rng)
    ids = encode(tools.tokenizer.render(record["prompt"], tools=tools.schemas))
    prompt, result = Prompt(number, record["prompt"], ids), record["answer"]
    called, read = [], []
    if rng.random() < calls:
        a, b = re.findall(r"\d+", record["prompt"][0]["content"])
        called = encode(f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}<|end|>")
        read = encode(f"<|tool|>{result}<|assistant|>")
    else:
        result = str(rng.randint(10, 99) * rng.randint(10, 99))
    answer = encode(f"<answer>{result}</answer><|end|>")
    own = [True] * len(called) + [False] * len(read) + [True] * len(answer)
    ids = [*called, *read, *answer]
    zeros = [0] * len(ids)
    return Sample(prompt, 0, ids, zeros, True, zeros, own, advantage=1.0)


def question(rng: random.Random) -> dict:
    """Return a record of the data set."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return {"prompt": [{"role": "user", "content": f"{a}*{b}="}], "answer": str(a * b)}


def write_data(folder: Path) -> None:
    rng = random.Random("data")
    for name, size in {"train": 1000, "test": 100}.items():
        lines = [json.dumps(question(rng)) + "\n" for _ in range(size)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    make_base(Path(sys.argv[1]) / "base")
    write_data(Path(sys.argv[1]))
