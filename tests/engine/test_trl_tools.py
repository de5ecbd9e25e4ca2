"""Tool calls equal those of TRL: its own loop and ours continue the same written conversations.

Read next: test_tools.py (everything that TRL does not do, or does otherwise).
"""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
from transformers import AutoTokenizer
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, get_training_chat_template

from nanogrpo import Config
from nanogrpo.extras.tools.calls import ToolCalls
from tests.engine.chat import Scripted, call, converse, write_chat_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def divide(a: float, b: float) -> float:
    """Divide two numbers.

    Args:
        a: The dividend.
        b: The divisor.
    """
    return a / b


async def look_up(word: str) -> dict:
    """Look up a word.

    Args:
        word: The word.
    """
    await asyncio.sleep(0)
    return {"word": word, "found": "é?"}


TOOLS = [multiply, divide, look_up]
END = "<|im_end|>"
CONVERSATIONS = [
    ["<think>\nI know that.\n</think>\n\n42" + END],
    ["I do not need a tool." + END],
    [call("multiply", a=6, b=7) + END, "It is 42." + END],
    [
        "<think>\nTwo steps.\n</think>\n\nLet me see.\n"
        + call("multiply", a=2, b=3)
        + "\n"
        + call("divide", a=1, b=4)
        + END,
        call("look_up", word="times") + END,
        "Both are done." + END,
    ],
    [call("power", a=6) + END, "There is no such tool." + END],
    [call("multiply", a=6, c=7) + END, "Sorry for the arguments." + END],
    [call("divide", a=6, b=0) + END, "One cannot divide by 0." + END],
    [call("look_up", a=6) + END, "That has a word." + END],
    ["first " + call("multiply", a="ha", b=70) + END, "A long answer." + END],
    ["never " + call("multiply", a="ha", b=400) + END],  # its answer does not fit
    ["cut " + call("multiply", a="ha", b=145) + END, "The end of this is cut off" + END],
    ["<think>\n" + call("multiply", a=1, b=1) + "\n</think>\n\nOnly a thought." + END],
    [call("multiply", a=0, b=0) + END, call("multiply", a="2", b="3") + END, "Enough." + END],
]


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def tokenizers(request, tmp_path_factory):
    """Our tokenizer and that of transformers, with the same files."""
    folder = tmp_path_factory.mktemp(request.param)
    template = (TEMPLATES / f"{request.param}.jinja").read_text()
    return write_chat_tokenizer(folder, template), AutoTokenizer.from_pretrained(folder)


def trl_loop(theirs, scripted, prompt_ids, limit, iterations):
    """Run TRL's tool loop on the conversations."""
    add_response_schema(theirs)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    n = len(CONVERSATIONS)

    def generate(prompts, *args, **kwargs):
        ids = [scripted.turn(ids, 0, 10_000) for ids in prompts]
        return ids, [[-1.0] * len(each) for each in ids]

    self = SimpleNamespace(
        max_tool_calling_iterations=iterations,
        _sync_tool_dicts=[{"multiply": multiply, "divide": divide}] * n,
        _async_tool_dicts=[{"look_up": look_up}] * n,
        async_loop=loop,
        use_vllm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10_000)),
        _is_vlm=False,
        max_completion_length=limit,
        environment_factories=None,
        tools=TOOLS,
        _tokenizer=theirs,
        processing_class=theirs,
        chat_template=get_training_chat_template(theirs)
        if "think" in theirs.chat_template
        else None,
        chat_template_kwargs={},
        _generate_single_turn=generate,
    )
    self._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(self, messages)
    first = [scripted.turn(prompt_ids, i, limit) for i in range(n)]
    completions = [
        [trl.chat_template_utils.parse_response(theirs, ids, prefix=prompt_ids, tools=TOOLS)]
        for ids in first
    ]
    logprobs = [[-1.0] * len(ids) for ids in first]
    prompts = [[{"role": "user", "content": "6 times 7?"}] for _ in first]
    result = GRPOTrainer._tool_call_loop(
        self, prompts, [prompt_ids] * n, first, completions, logprobs, None, {}
    )
    loop.call_soon_threadsafe(loop.stop)
    return result


def show(
    a: int,
    b: float,
    c: bool,
    d: str,
    e: list[int],
    f: dict,
    g: int | None,
    h: int | str,
    i: list | int,
) -> None:
    """Show."""


show.__doc__ = "\n    ".join(["Show.\n\nArgs:", *(f"{name}: X." for name in "abcdefghi")])
TEXTS = """7|7.0|-7| 7 |7.5|7.|1e3|1e400|nan|inf|1_000|1_|+7|0x10|0|1|True|False| FALSE |null|None
|NULL|[1]|{"a": "7"}|x||12345678901234567890|12345678901234567890.0"""


def test_arguments_written_as_text_equal_those_of_trl(tokenizers):
    ours, theirs = tokenizers
    add_response_schema(theirs)
    tools = ToolCalls(Config(), ours, [show])
    for value in ["[" * 5000, *TEXTS.replace("\n", "").split("|")]:
        text = call("show", **dict.fromkeys("abcdefghi", value)) + END
        (s,) = converse(tools, [[text, "So." + END]], max_tokens=100_000)
        made = s.conversation.messages[0]
        if "[[" not in value:  # TRL's parser raises RecursionError
            ids = ours.encode(text)
            parsed = trl.chat_template_utils.parse_response(theirs, ids, prefix=[], tools=[show])
            assert repr(made["tool_calls"]) == repr(parsed["tool_calls"]), value


@pytest.mark.parametrize("iterations", [1, 5])
def test_conversations_equal_those_of_trl(tokenizers, iterations):
    ours, theirs = tokenizers
    limit = 400
    tools = ToolCalls(Config(max_tool_calling_iterations=iterations), ours, TOOLS)
    samples = converse(tools, CONVERSATIONS, max_tokens=limit)
    prompt_ids = samples[0].prompt.token_ids
    kwargs = {"tools": TOOLS, "add_generation_prompt": True, "return_dict": False}
    assert prompt_ids == theirs.apply_chat_template(samples[0].prompt.text, **kwargs)
    mask, messages, ids, logp, calls, failures, _ = trl_loop(
        theirs, Scripted(ours, CONVERSATIONS), prompt_ids, limit, iterations
    )
    for i, s in enumerate(samples):
        assert s.conversation.messages == messages[i], CONVERSATIONS[i]
        assert s.token_ids == ids[i], CONVERSATIONS[i]
        assert s.is_model_token == [bool(m) for m in mask[i]]
        assert s.logp == logp[i]
    assert sum(s.conversation.calls for s in samples) == calls > 10
    assert sum(s.conversation.failures for s in samples) == failures > 3
    kinds = {len(m) for m in messages}
    assert kinds >= ({1, 3} if iterations == 1 else {1, 3, 5, 6})
    assert [not s.stopped for s in samples].count(True) == 2  # does not fit, is cut off
    assert [s.conversation.messages[-1]["role"] for s in samples] == ["assistant"] * len(samples)
