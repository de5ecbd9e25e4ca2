"""Run a recipe: one file with its own options and features, and all options of train.py.

    @dataclass(frozen=True)
    class Options(Config):                               # nanogrpo.Config, so all options
        strength: float = option(1.0, "factor of …", ">= 0")

    def features(cfg):                                   # cfg is a valid Options
        return [MyFeature(cfg.strength)]

    if __name__ == "__main__":
        sys.exit(main(Options, features))

In: the options and features of the recipe, and argv. Out: the exit status. The file runs in place
of train.py, from any folder: `python recipe.py --model M …`, also with torchrun. `--config`,
`--help-all` and the check of `--resume` include the options of the recipe. `--help` shows only
these options.
The options need `from __future__ import annotations`, as in every recipe of examples/recipes/. Read
next: attach.py, docs/recipes.md.
"""

import dataclasses
import inspect
import sys
from collections.abc import Sequence

from nanogrpo import cli
from nanogrpo.extras.api import Features, Given, loop
from nanogrpo.extras.options import FIELDS, Config


def main(options: type[Config], features: Features, argv: Sequence[str] | None = None) -> int:
    """Train with the features of a recipe, and return the exit status.

    `options` is a frozen dataclass that extends `Config` with options of the recipe. `features` is
    a function of the options. The recipe's features attach after those that options select.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    own = [field for field in dataclasses.fields(options) if field.name not in FIELDS]
    for field in own[:1]:
        field.metadata = {"group": "Options of the recipe", **field.metadata}  # type: ignore[assignment]
    if {"-h", "--help"} & {*words}:
        text = inspect.getdoc(inspect.getmodule(features)) or ""
        more = "All options of train.py: --help-all."
        cli.parser(
            options, {field.name for field in own}, "%(prog)s [options]", text, more
        ).print_help()
        return 0
    return loop()["main"](words, Given(options=options, features=features))
