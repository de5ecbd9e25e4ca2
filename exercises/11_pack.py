"""Exercise 11: pack two samples by hand.

nanogrpo pads nothing: it lays sequences end to end in one strip. The completions of a group share
their prompt, which is computed once. Read the docstring of `PackedBatch` in nanogrpo/types.py, with
its example, then pack

    prompt         10 11 12
    completion 0   20 21 22
    completion 1   30 31

The last token of a completion is a target, but not an input. The checker calls the project's
`pack`.

    python -m exercises.check 11
"""

TOKENS = ...  # a list of the T input tokens
POSITIONS = ...  # the position of each of them in its own text
CU_SEQLENS = ...  # where the three sequences (the prompt, two completions) begin, and the end
KV_ROWS = ...  # the rows of the strip that each sequence attends to, all in one list
TARGETS = ...  # the M tokens to predict
ROWS = ...  # for each target, the row of the strip whose output predicts it
