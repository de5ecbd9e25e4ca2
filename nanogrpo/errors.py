"""`UserError`: a mistake of the user's (config, data, checkpoint, server address), told in one
sentence.

The message names the field, or the file and line, and says what to do. `train.py` and `serve.py`
print it without a traceback and exit with status 2; every other exception is a bug of ours and
propagates with its traceback.
"""


class UserError(Exception):
    """One sentence: what is wrong, where, and what to do about it."""
