"""List the installed versions of all packages, and the missing packages with their features.

    nanogrpo doctor

In: the requirements of the installed package, which come from pyproject.toml. Out: a line for each
required package. If a package is missing or has a version that is not supported, the line ends with
the command that installs it.
"""

import platform
import re
from importlib import metadata

from packaging.requirements import Requirement

from nanogrpo.errors import UserError

# The optional dependencies in pyproject.toml, and the features that need them.
USES = """
data         data sets of the hub, Parquet files
reasoning    --data reasoning_gym:…
plot         nanogrpo plot
tensorboard  --report-to tensorboard
trackio      --report-to trackio
wandb        --report-to wandb
vision       pictures in prompts
tools        --tools, --environment-factory
torchao      --optim adamw_torch_8bit
vllm         --engine vllm, unless $NANOGRPO_VLLM_PYTHON has it
"""


def main(argv: list[str]) -> None:
    try:
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    except (ImportError, OSError) as e:  # OSError: a library of CUDA cannot be loaded
        gpu = f"and torch cannot be imported: {e}"
    print(f"Python {platform.python_version()}, {gpu}")
    try:
        needs = metadata.requires("nanogrpo") or ()
    except metadata.PackageNotFoundError as e:
        raise UserError("nanogrpo is not installed: run pip install -e . in its folder.") from e
    uses = {"": "every run", **dict(re.findall(r"(\w+) +(.+)", USES))}
    for need in map(Requirement, needs):
        extra = "".join(re.findall('extra == "(.*)"', f"{need.marker}"))
        if extra not in uses:
            continue
        package = next(iter(metadata.distributions(name=need.name)), None)
        found = package.version if package else "missing"
        fits = package and need.specifier.contains(found, prereleases=True)
        install = f"pip install 'nanogrpo{extra and f'[{extra}]'}'  # {need.name}{need.specifier}"
        print(f"{need.name:16}  {found:14}  {uses[extra]:44}  {'' if fits else install}".rstrip())
