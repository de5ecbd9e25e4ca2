"""Attach the task `arithmetic` (--data arithmetic).

Read next: task.py, and warmup.py (a base model that can still improve on the task).
"""

from typing import Any

from nanogrpo.extras.arithmetic import task
from nanogrpo.feature import Feature


class Arithmetic(Feature):
    def rows(self, source: Any, split: str) -> list[dict] | None:
        named = isinstance(source, str) and source == task.NAME
        return task.records("train" if split == "train" else "eval") if named else None
