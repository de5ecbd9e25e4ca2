"""The console command `nanogrpo`, which starts the programs of the project.

    nanogrpo train --profile debug           # the same as python train.py --profile debug
    torchrun --nproc-per-node 8 -m nanogrpo train --model M --data D

In: argv. Out: the exit status of the program. In a checkout, train.py and serve.py are next to the
package. In a wheel, they are in nanogrpo/scripts/ (setup.py copies them). Read next: train.py.
"""

import importlib
import os
import runpy
import sys
from pathlib import Path

from nanogrpo.errors import UserError

HELP = """usage: nanogrpo COMMAND [options]

  demo     see a tiny model learn, in one to five minutes on a CPU
  train    train a model with GRPO
  serve    start a vLLM server that follows the trainer
  chat     talk to a checkpoint in the terminal
  eval     measure a checkpoint on held-out data
  runs     list runs: what they learned, and the checkpoint to use
  plot     plot the log of a run
  view     look at a run in the browser: curves, completions and tokens
  doctor   list the versions of all packages, and what is missing
  warmup   make a tiny model that has learned some arithmetic

nanogrpo COMMAND --help lists the options of a command."""

MODULES = {
    "chat": "nanogrpo.extras.chat",
    "demo": "nanogrpo.extras.arithmetic.demo",
    "doctor": "nanogrpo.extras.doctor",
    "eval": "nanogrpo.extras.eval",
    "plot": "nanogrpo.extras.plot",
    "runs": "nanogrpo.extras.summary",
    "view": "nanogrpo.extras.view.server",
    "warmup": "nanogrpo.extras.arithmetic.warmup",
}
WITHOUT_OPTIONS = ("demo", "doctor", "runs")


def script(name: str) -> Path:
    """Return the path of train.py or serve.py."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "scripts" / name
    return installed if installed.exists() else package.parent / name


def run(command: str, *options: str) -> None:
    if command in ("-h", "--help"):
        print(HELP)
    elif command in ("train", "serve"):  # these programs report errors themselves, and exit
        sys.argv[1:] = options
        runpy.run_path(str(script(f"{command}.py")), run_name="__main__")
    elif command not in MODULES:
        raise UserError(f"nanogrpo has no command {command}: see --help.")
    else:
        module = importlib.import_module(MODULES[command])
        if command in WITHOUT_OPTIONS and "-" in "".join(options)[:1]:
            print(module.__doc__)
        else:
            module.main([*options])


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit status."""
    try:
        try:
            run(*((sys.argv[1:] if argv is None else argv) or ["--help"]))
        finally:
            sys.stdout.flush()
    # FloatingPointError: the logits are not finite; UnicodeDecodeError: the input is not UTF-8
    except (UserError, FloatingPointError, UnicodeDecodeError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `| head`; Python flushes stdout again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
