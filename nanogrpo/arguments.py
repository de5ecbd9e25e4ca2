"""Read the arguments in a name such as `reasoning_gym:countdown:size=500,seed=1`.

In: the text after the last colon. Out: the arguments by name. Used for data sources and for reward
functions. Read next: data/gym.py, rewards/plugin.py.
"""

from __future__ import annotations

import ast
from typing import Any


def parse_arguments(text: str) -> dict[str, Any]:
    """Return {"size": 500, "kind": "easy"} for "size=500,kind=easy".

    Arguments are written as in a Python call. A single word is a text, apart from true and false.
    Raises ValueError.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as e:
        raise ValueError(str(e)) from e
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("a value without a name")
    if len({keyword.arg for keyword in call.keywords} - {None}) < len(call.keywords):
        raise ValueError("a name twice")
    return {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}


def _value(node: ast.expr) -> Any:
    words = {"true": True, "false": False}
    return words.get(node.id, node.id) if isinstance(node, ast.Name) else ast.literal_eval(node)
