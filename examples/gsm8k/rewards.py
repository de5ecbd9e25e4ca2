"""A reward function for the format that system.txt asks for.

    python train.py … --system-prompt examples/gsm8k/system.txt \
        --reward-funcs accuracy examples/gsm8k/rewards.py:boxed_last_line

In: completions. Out: 1 for a completion in the format, else 0. Read next: README.md.
"""

import re

LAST_LINE = re.compile(r"\$?\\boxed\{-?[\d.,]*\d\}\$?\.?")


def boxed_last_line(completions, **kwargs):
    """Return 1 if the last line is a box with a number, and there is no other box; else 0."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(is_formatted(text)) for text in texts]


def is_formatted(text):
    answer = text.rpartition("</think>")[2].strip()  # the reasoning may also contain boxes
    last_line = answer.rpartition("\n")[2].strip()
    return answer.count("\\boxed") == 1 and LAST_LINE.fullmatch(last_line) is not None
