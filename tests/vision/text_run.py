"""A run without pictures, in a process that has imported nothing else. Read next: test_train.py."""

from __future__ import annotations

import sys
from pathlib import Path

import train
from tests.conftest import arguments


def imported(base: Path, files: Path, output: Path) -> list[str]:
    """Return the modules for pictures that the run has imported."""
    assert train.main(arguments(base, files, output, "--max-steps", "1")) == 0
    return [name for name in sys.modules if name.startswith(("PIL", "nanogrpo.vision"))]
