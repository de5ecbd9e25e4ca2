"""Solution of exercise 11.

T is 6. With a copy of the prompt in each sequence it would be 9. Both completions begin at the
output of row 2, the last token of the prompt; so this row occurs twice in ROWS, and its gradient is
the sum of both.

The project's function is `_pack` in nanogrpo/grpo/packing.py.
"""

TOKENS = [10, 11, 12, 20, 21, 30]
POSITIONS = [0, 1, 2, 3, 4, 3]
CU_SEQLENS = [0, 3, 5, 6]
KV_ROWS = [0, 1, 2] + [0, 1, 2, 3, 4] + [0, 1, 2, 5]
TARGETS = [20, 21, 22, 30, 31]
ROWS = [2, 3, 4, 2, 5]
