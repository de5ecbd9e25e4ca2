"""Check an exercise of docs/exercises.md: it is right, or there is a hint.

    python -m exercises.check 7                 # check exercises/07_normalizers.py
    python -m exercises.check                   # check all of them

In: the number of an exercise. Out: "right", or a hint about the first thing that is wrong. The
check of exercise 7 is checks/07_normalizers.py, and the solution is solutions/07_normalizers.py.
Each check compares with the project's own functions or with float64. Read next: hints.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import textwrap
import traceback
from pathlib import Path
from types import ModuleType

from exercises.hints import Hint, NotYet
from nanogrpo.extras.tools.timelimit import limited

FOLDER = Path(__file__).resolve().parent
SECONDS = 120.0  # for one check; the slowest takes about twenty


def files() -> dict[int, Path]:
    """Return the file to fill in of each exercise."""
    return {int(path.name[:2]): path for path in sorted(FOLDER.glob("[0-9][0-9]_*.py"))}


def load(path: Path) -> ModuleType:
    """Run a file whose name begins with a number, which an import statement cannot name."""
    spec = importlib.util.spec_from_file_location(f"answer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(number: int, path: Path | None = None) -> str | None:
    """Return None if a file solves an exercise, or else a hint. path: None means the one to fill
    in.
    """
    path = path or files()[number]
    checker = load(FOLDER / "checks" / files()[number].name)
    try:
        limited(lambda: checker.check(load(path)), SECONDS)
    except NotYet as e:
        return f"{e}. {checker.START}"
    except Hint as e:
        return str(e)
    except TimeoutError:
        return f"Your code has not ended after {SECONDS:g} s. Look for a loop that never ends."
    except SyntaxError as e:
        return f"Python cannot read line {e.lineno} of {path.name}: {e.msg}."
    # the learner's code may raise anything, and exit() raises SystemExit
    except (Exception, SystemExit) as e:
        return _failed(e, path, checker.START)
    return None


def _failed(error: BaseException, path: Path, start: str) -> str:
    """Return a hint about an exception: where in the learner's file, and what it says."""
    while error.__cause__ is not None:  # Triton's interpreter wraps what a kernel raises
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    message = next(iter(str(error).splitlines()), "")
    what = f"{type(error).__name__}: {message}".rstrip(":. ")
    if lines:
        hint = f"Line {lines[-1]} of {path.name} raises {what}."
        # torch raises RuntimeError and IndexError for shapes that do not fit
        return f"{hint} {start}" if isinstance(error, RuntimeError | IndexError) else hint
    return f"The check cannot use what your code returns ({what}). Read again what it must return."


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m exercises.check", description="Check exercises of docs/exercises.md."
    )
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="default: all")
    numbers = parser.parse_args(argv).numbers or list(files())
    unknown = [number for number in numbers if number not in files()]
    if unknown:
        problem = f"there is no exercise {unknown[0]}: choose from 1 to {max(files())}."
        print(f"error: {problem}", file=sys.stderr)
        return 2
    # Exercise 15 defines a Triton kernel. The interpreter runs it, with or without a GPU.
    os.environ["TRITON_INTERPRET"] = "1"
    wrong = 0
    for number in numbers:
        path = files()[number]
        hint = check(number)
        wrong += hint is not None
        print(f"{number:2} exercises/{path.name}: {'right' if hint is None else 'not yet'}")
        if hint is not None:
            print(textwrap.fill(hint, 100, initial_indent="   ", subsequent_indent="   "))
        elif len(numbers) == 1:
            print(f"   Compare with exercises/solutions/{path.name}.")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
