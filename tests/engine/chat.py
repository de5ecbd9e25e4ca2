"""Helpers for the tests of tools: a tokenizer with a chat template, and a model that says what a
test has written down.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from nanogrpo.engine.base import SamplingParams
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.extras.tools.turns import TurnsEngine
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import Prompt, Sample
from tests.conftest import SOLO, edit_json

# A template as that of Qwen2.5: tools in the system message, answers in a user message.
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def write_chat_tokenizer(folder: Path, template: str = TEMPLATE) -> Tokenizer:
    """Write a tokenizer of single characters with the special tokens of Qwen's models."""
    folder.mkdir(parents=True, exist_ok=True)
    warmup.write_tokenizer(folder)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    inner.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    inner.save(str(folder / "tokenizer.json"))
    stops = [inner.token_to_id("<|im_end|>"), inner.token_to_id("<|endoftext|>")]
    edit_json(folder / "generation_config.json", eos_token_id=stops)
    edit_json(folder / "tokenizer_config.json", eos_token="<|im_end|>", chat_template=template)
    return Tokenizer(folder)


class Scripted:
    """An engine that samples written conversations: the i-th completion of each prompt says the
    turns of conversations[i].
    """

    version = 0

    def __init__(self, tokenizer: Tokenizer, conversations: Sequence[Sequence[str]]):
        self.tokenizer, self.conversations = tokenizer, conversations

    def turn(self, ids: list[int], index: int, room: int) -> list[int]:
        """Return the next turn after a prompt and, except in the first turn, a completion."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        said = text.count("<|im_start|>assistant") - 1
        for i, turns in enumerate(self.conversations):
            if i == index if said == 0 else all(turn in text for turn in turns[:said]):
                return self.tokenizer.encode(turns[said])[:room]
        raise AssertionError(f"no conversation continues {text!r}")

    def sample(self, prompts, n, params, step):
        out = []
        for p in prompts:
            for i in range(n):
                ids = self.turn(p.token_ids, i, p.max_tokens or params.max_tokens)
                logp, versions = [-1.0] * len(ids), [self.version] * len(ids)
                stopped = ids[-1] in params.stop_token_ids
                out.append(Sample(p, i, ids, logp, stopped, versions))
        return out

    def metrics(self):
        return {}


def converse(tools, conversations, *, max_tokens: int = 600, columns=()) -> list[Sample]:
    """Let the tools run on written conversations. columns: those of each prompt."""
    tokenizer = tools.tokenizer
    question = [{"role": "user", "content": "6 times 7?"}]
    ids = tokenizer.encode(tokenizer.render(question, tools=tools.schemas))
    prompts = [Prompt(i, question, ids, dict(c)) for i, c in enumerate(columns or [{}])]
    engine = Scripted(tokenizer, conversations)
    turns = TurnsEngine(engine, tools, tokenizer, tokenizer.vocab_size, SOLO.gather)
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=tokenizer.stop_token_ids)
    return turns.sample(prompts, len(conversations), params, 0)


def call(name: str, **arguments) -> str:
    """Return a tool call as a model writes it."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


SHORT = """
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for m in messages %}
{{- '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{%- if m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

DOUBLE = '''
def double(x: int) -> int:
    """Double.

    Args:
        x: A number.
    """
    return 2 * x

class Doubler:
    def reset(self, prompt, **row):
        self.calls = 0
        return f" at {len(prompt)}"

    def double(self, x: int) -> int:
        """Double.

        Args:
            x: A number.
        """
        self.calls += 1
        return 2 * x

    def get_reward(self):
        return float(self.calls)

def used(completions, environments, **kwargs):
    return [e.calls / len(messages) for e, messages in zip(environments, completions)]
'''


def write_calling_base(base: Path, folder: Path) -> list[str]:
    """Copy a checkpoint of random weights, and make it call tools: some of its tokens are complete
    calls, and others end a turn. Return the options of a run with a tool. Its file, double.py, has
    an environment, too.
    """
    shutil.copytree(base, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for i, letter in enumerate("abcdefghijklmnop"):
        vocabulary[call("double" if i % 4 else "missing", x=i)] = vocabulary.pop(letter)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    stops = [vocabulary[each] for each in "~^`@#$&%;!"]
    edit_json(folder / "generation_config.json", eos_token_id=stops)
    edit_json(folder / "tokenizer_config.json", chat_template=SHORT)
    (folder / "double.py").write_text(DOUBLE)
    return ["--model", str(folder), "--tools", f"{folder / 'double.py'}:double"]
