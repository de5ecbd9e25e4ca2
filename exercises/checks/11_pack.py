"""Check exercise 11 against `packing.pack`."""

from exercises.hints import Hint, expect, given
from nanogrpo import Config
from nanogrpo.grpo import packing, schedule
from nanogrpo.types import Prompt, Sample

START = "Begin with the prompt, then each completion without its last token."

# what a list may be instead, and why that is wrong
MISTAKES = {
    "TOKENS": {
        (10, 11, 12, 20, 21, 22, 30, 31): "The last token of a completion is predicted, but never"
        " read: no token follows it.",
        (
            10,
            11,
            12,
            20,
            21,
            10,
            11,
            12,
            30,
        ): "The prompt is there twice. The completions share it.",
    },
    "POSITIONS": {
        (
            0,
            1,
            2,
            3,
            4,
            5,
        ): "Completion 1 also follows the prompt: its first token is at position 3.",
        (0, 1, 2, 0, 1, 0): "A completion follows the prompt, so its positions go on from there.",
    },
    "CU_SEQLENS": {
        (0, 3, 5): "The last number is the end of the strip.",
        (3, 5, 6): "The first sequence begins at 0.",
        (0, 3, 6): "The prompt is a sequence of its own, and so is each completion.",
        (3, 2, 1): "These are the lengths. Add them up from the left, beginning with 0.",
    },
    "KV_ROWS": {
        (0, 1, 2, 3, 4, 5): "A completion also attends to the prompt: its rows come first.",
        (0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5): "The completions must not see each other.",
        (0, 1, 2, 3, 4, 0, 1, 2, 5): "The prompt is a sequence too, and attends to itself.",
        (0, 1, 2) * 3: "A completion also attends to its own rows, after the prompt's.",
        (10, 11, 12, 10, 11, 12, 20, 21, 10, 11, 12, 30): "These are tokens. Give their rows, that"
        " is, their places in TOKENS.",
    },
    "TARGETS": {
        (21, 22, 31): "The first token of each completion is a target too: the prompt predicts it.",
        (10, 11, 12, 20, 21, 22, 30, 31): "Prompts are not trained on.",
    },
    "ROWS": {
        (3, 4, 5, 5, 6): "A row predicts the token that follows it, not its own.",
        (2, 3, 4, 4, 5): "The first token of completion 1 follows the prompt, not completion 0.",
        (2, 3, 4, 3, 5): "The first token of completion 1 follows the last token of the prompt.",
    },
}


def check(answer) -> None:
    prompt, cfg = Prompt(0, "", [10, 11, 12]), Config()
    samples = [
        Sample(prompt, i, ids, [-1.0] * len(ids), True, [0] * len(ids), advantage=1.0 - 2 * i)
        for i, ids in enumerate(([20, 21, 22], [30, 31]))
    ]
    (batch,) = packing.pack(
        schedule.plan(range(len(samples)), [s.facts for s in samples], cfg), samples, cfg
    )
    for name, mistakes in MISTAKES.items():
        found, right = given(getattr(answer, name), name), getattr(batch, name.lower()).tolist()
        expect(
            not any(isinstance(x, list | tuple) for x in found),
            f"{name} has lists in it. Make it one list, with all numbers one after the other.",
        )
        if list(found) == right:
            continue
        if tuple(found) in mistakes:
            raise Hint(f"{name}: {mistakes[tuple(found)]}")
        if len(found) != len(right):
            raise Hint(f"{name} has {len(found)} numbers and needs {len(right)}.")
        place = next(i for i, (a, b) in enumerate(zip(found, right)) if a != b)
        raise Hint(
            f"{name}[{place}] is {found[place]}, which is wrong. Go through it from the left."
        )
