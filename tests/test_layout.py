"""Tests of the layout: who may import whom, what a wheel contains, and the name of kernels/.

A new folder first gets a place in ORDER. Read next: nanogrpo/kernels.py.
"""

import ast
import functools
import graphlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers.utils import import_utils

from nanogrpo.commands import HELP, MODULES, main, script

ROOT = Path(__file__).parents[1]
PATTERNS = [
    "nanogrpo/**/*.py",
    "kernels/*.py",
    "bench/**/*.py",
    "tests/**/*.py",
    "examples/**/*.py",
    "exercises/**/*.py",
    "docs/**/*.py",
    "*.py",
]
SOURCES = {str(p.relative_to(ROOT)): p for pattern in PATTERNS for p in sorted(ROOT.glob(pattern))}

# Each folder (or file) may import itself and those on the lines above.
ORDER = [
    "timelimit errors arguments kernels commands __main__",
    "types config trl_names cli",
    "model",
    "vision",
    "data",
    "distributed",
    "rewards",
    "engine",
    "grpo",
    "vllm logs",
    "run",
    "step",
    "train",
    "api",
    "__init__ chat eval",
]
# nanogrpo/vision/ is for few runs, so the core imports it only here, inside functions.
FOR_PICTURES = {
    "nanogrpo/model/hf_config.py": {"vision.config"},
    "nanogrpo/model/checkpoint.py": {"vision.model"},
    "nanogrpo/data/prompts.py": {"vision.data"},
}
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names.split()}
# Other interpreters and processes start these files, so they import little else of the project.
ALONE = {
    "serve.py": {"errors", "distributed.parent", "vllm.auth", "vllm.limits", "vllm.secret"},
    "nanogrpo/vllm/worker.py": {"distributed.parent", "vllm.buckets"},
    "nanogrpo/rewards/process.py": {
        "errors",
        "distributed.parent",
        "rewards.call",
        "rewards.plugin",
    },
}

# The files and folders where a library may be imported.
ONLY_IN = {
    "torch.distributed": "nanogrpo/distributed/ nanogrpo/vllm/ nanogrpo/run/state.py"
    " nanogrpo/run/memory.py nanogrpo/model/checkpoint.py bench/ tests/",
    "vllm": "serve.py nanogrpo/vllm/worker.py tests/",
    "uvicorn": "nanogrpo/vllm/limits.py tests/",
    "transformers": "bench/ tests/ examples/",
    "peft": "tests/",
    "trl": "bench/ tests/",
    "triton": "kernels/ bench/ tests/ examples/ladder.py exercises/",
    "flash_attn": "nanogrpo/model/attention.py bench/ tests/",
    "math_verify": "nanogrpo/rewards/symbolic.py",
    "pyarrow": "nanogrpo/data/sources.py tests/",
    "PIL": "nanogrpo/vision/ tests/ examples/ bench/",
    "datasets": "nanogrpo/data/hub.py bench/ tests/",
    "reasoning_gym": "nanogrpo/data/gym.py tests/",
    "torchao": "nanogrpo/run/optim.py tests/",
    "bitsandbytes": "bench/ tests/",
    "yaml": "nanogrpo/cli.py",
    "wandb": "nanogrpo/logs/report.py tests/",
    "trackio": "nanogrpo/logs/report.py tests/",
    "tensorboard": "nanogrpo/logs/report.py tests/",
    "matplotlib": "nanogrpo/logs/plot.py bench/ examples/ docs/img/draw.py",
}


@functools.cache
def imports(path: Path) -> set[str]:
    """Return every module that a file imports, also inside functions.

    `from a import b` gives a and a.b. Only kernels/ may use relative imports.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = "nanogrpo.kernels" if node.level else ""
            module = ".".join(filter(None, [package, node.module]))
            assert not node.level or path.parent.name == "kernels", f"{path}: a relative import"
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.add("torch.distributed")
    return found


def ours(path: Path) -> set[str]:
    """Return the modules of the project that a file imports, such as "model.decoder"."""
    found = set()
    for module in imports(path):
        first, _, rest = module.partition(".")
        if first in ("train", "serve"):
            found.add(first)
        parts = rest.split(".") if first == "nanogrpo" and rest else []
        while parts:  # `from a.b import c`: c may be a module, or a name in the module a.b
            base = ROOT / "nanogrpo" / "/".join(parts)
            if base.with_suffix(".py").exists() or parts[0] == "kernels":
                found.add(".".join(parts))
                break
            parts.pop()
    return found


def entry(name: str) -> str:
    """Return the entry of ORDER for a file: its folder in the package, or its own name."""
    parts = Path(name).parts
    if parts[0] == "kernels":
        return "kernels"
    return parts[1] if len(parts) > 2 else Path(name).stem


PRODUCT = [n for n in SOURCES if n.startswith(("nanogrpo/", "kernels/")) or n == "train.py"]


@pytest.mark.parametrize("name", PRODUCT)
def test_each_folder_imports_only_folders_above_it(name):
    if entry(name) == "kernels" and name != "nanogrpo/kernels.py":
        named = {module.split(".")[0] for module in imports(SOURCES[name])}
        assert named - set(sys.stdlib_module_names) <= {"torch", "triton", "nanogrpo"}
        assert all(module.startswith("kernels") for module in ours(SOURCES[name]))
    for module in ours(SOURCES[name]) - FOR_PICTURES.get(name, set()):
        other = module.split(".")[0]
        assert (
            other == entry(name)
            or LEVEL[other] < LEVEL[entry(name)]
            or (LEVEL[other] == LEVEL[entry(name)] and LEVEL[other] <= 1)
        ), f"{name} imports {module}, which is not above it in ORDER"


def test_the_core_imports_the_folder_for_pictures_in_three_functions():
    for name in PRODUCT:
        if entry(name) != "vision":
            found = {module for module in ours(SOURCES[name]) if module.startswith("vision")}
            assert found == FOR_PICTURES.get(name, set())
            above = ast.parse(SOURCES[name].read_text()).body
            assert not any("nanogrpo.vision" in ast.unparse(x) for x in above if is_import(x))


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


@pytest.mark.parametrize("name", ALONE)
def test_files_started_by_other_interpreters_import_little(name):
    assert {m for m in ours(SOURCES[name]) if m} <= ALONE[name]


def test_the_tests_that_the_security_page_names_exist():
    file, count = Path(), 0
    named = r"(tests/[\w/]+\.py)|`(test_\w+)`"
    for path, name in re.findall(named, (ROOT / "SECURITY.md").read_text()):
        file = ROOT / path if path else file
        assert not name or f"\ndef {name}(" in file.read_text(), f"{file} has no {name}"
        count += bool(name)
    assert count > 20


def test_no_two_files_import_each_other():
    graph = {n: ours(p) for n, p in SOURCES.items() if n in PRODUCT}
    names = {".".join(Path(n).with_suffix("").parts).removeprefix("nanogrpo."): n for n in graph}
    order = {n: {names[m] for m in modules if m in names} - {n} for n, modules in graph.items()}
    graphlib.TopologicalSorter(order).prepare()


@pytest.mark.parametrize("library", ONLY_IN)
def test_libraries_are_imported_only_where_they_belong(library):
    users = {
        n
        for n, path in SOURCES.items()
        if any(f"{m}.".startswith(f"{library}.") for m in imports(path))
    }
    assert not [n for n in users if not n.startswith(tuple(ONLY_IN[library].split()))]


def test_imports_finds_every_kind_of_import(tmp_path):
    (tmp_path / "kernels").mkdir()
    path = tmp_path / "kernels" / "x.py"
    path.write_text(
        "import a.b as c\ndef f():\n    from d import e\nfrom .g import h\nfrom . import i\n"
        "torch.distributed.get_rank()\n"
    )
    expected = {
        "a.b",
        "d",
        "d.e",
        "nanogrpo.kernels.g",
        "nanogrpo.kernels.g.h",
        "nanogrpo.kernels",
        "nanogrpo.kernels.i",
    }
    assert imports(path) == {*expected, "torch.distributed"}


# --- every file ---


@pytest.mark.parametrize("name", SOURCES)
def test_every_file_has_a_docstring_and_no_bare_except(name):
    text = SOURCES[name].read_text()
    assert ast.get_docstring(ast.parse(text)), "a file starts with what it is"
    assert not re.search(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b", text)
    handlers = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ExceptHandler)]
    assert all(handler.type for handler in handlers), "a bare except"


# --- the folder kernels/ and the wheel ---


def test_no_file_is_importable_as_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()  # nanogrpo/kernels.py explains why
    assert not (ROOT / "bench" / "kernels.py").exists()  # run as a script it would be `kernels`
    assert not (ROOT / "tests" / "kernels.py").exists()


# A stand-in for Hugging Face's package: it has any name that transformers asks for.
DECOY = """
DECOY = True
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda *_, **__: None, "__call__": lambda self, f: f})
"""

# vLLM's workers are spawned by multiprocessing, so the checks run in such a process. The process
# that spawns it imports as little as possible.
PROBE = """
import importlib.util, multiprocessing, sys
from pathlib import Path

def check(folder):
    import kernels
    assert kernels.DECOY, kernels
    import nanogrpo.kernels.reference
    assert Path(nanogrpo.kernels.reference.__file__).parent == Path(folder)
    assert list(nanogrpo.kernels.__path__) == [folder]
    import transformers
    assert transformers.utils.is_kernels_available()  # transformers takes the decoy for the package
    from transformers import Qwen3ForCausalLM
    from transformers.integrations import hub_kernels
    assert sys.modules["kernels"] is kernels

if __name__ == "__main__":
    import nanogrpo.kernels
    reference = importlib.util.find_spec("nanogrpo.kernels.reference")
    assert reference.origin == sys.argv[1] + "/reference.py"
    assert importlib.util.find_spec("kernels").origin == sys.argv[2] + "/kernels/__init__.py"
    worker = multiprocessing.get_context("spawn").Process(target=check, args=(sys.argv[1],))
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
"""

# In a wheel, run the console command as pip's launcher does. The parent process of a spawned worker
# is then that launcher, which is not repeated here.
COMMAND = """
import importlib.metadata, importlib.util, sys
(command,) = importlib.metadata.entry_points(group="console_scripts", name="nanogrpo")
try:
    sys.exit(command.load()())
finally:
    import kernels
    assert kernels.DECOY, kernels
    reference = importlib.util.find_spec("nanogrpo.kernels.reference").origin
    assert reference == sys.path[1] + "/nanogrpo/kernels/reference.py", reference
"""


def write_decoy(site: Path) -> None:
    """Write an installed package `kernels`, with the metadata that transformers looks for."""
    (site / "kernels" / "layer").mkdir(parents=True)
    for module in ("__init__.py", "layer/__init__.py", "layer/mode.py"):
        (site / "kernels" / module).write_text(DECOY)
    version = import_utils.KERNELS_MIN_VERSION
    info = site / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    # transformers reads here which distribution a package belongs to
    (info / "RECORD").write_text("kernels/__init__.py,,\n")


def run(*argv: object, cwd: Path, path: Sequence[Path] = ()) -> str:
    """Run Python with these folders on its path, and return what it prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, *map(str, argv)], env=env, cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_folder_kernels_shadows_nothing_in_a_checkout(tmp_path):
    site = tmp_path / "site"
    write_decoy(site)
    (tmp_path / "probe.py").write_text(PROBE)
    run(tmp_path / "probe.py", ROOT / "kernels", site, cwd=ROOT, path=[ROOT, site])


def test_a_wheel_has_every_module_and_the_command_and_shadows_nothing(tmp_path):
    """Unpack a wheel as pip does, into a folder where Hugging Face's package is installed too."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md", "train.py", "serve.py"):
        shutil.copy(ROOT / name, source)
    for name in ("nanogrpo", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run("-c", build, tmp_path, cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)

    modules = {str(p.relative_to(ROOT)) for p in ROOT.glob("nanogrpo/**/*.py")}
    modules |= {f"nanogrpo/kernels/{p.name}" for p in ROOT.glob("kernels/*.py")}
    modules |= {"nanogrpo/scripts/train.py", "nanogrpo/scripts/serve.py"}
    assert {str(p.relative_to(site)) for p in site.rglob("*.py")} == modules
    assert (site / "nanogrpo" / "py.typed").exists()
    assert (site / "nanogrpo" / "logs" / "view.html").exists()
    assert [p.name for p in site.iterdir() if p.suffix != ".dist-info"] == ["nanogrpo"]

    write_decoy(site)
    assert "train a model with GRPO" in run("-m", "nanogrpo", cwd=tmp_path, path=[site])
    for name, option in {"train": "--num-generations", "serve": "--secret-file"}.items():
        assert option in run("-c", COMMAND, name, "--help", cwd=tmp_path, path=[site])


def test_the_commands_of_a_checkout_are_its_own_files():
    assert script("train.py") == ROOT / "train.py"
    assert script("serve.py") == ROOT / "serve.py"
    assert all(importlib.util.find_spec(module) for module in MODULES.values())
    assert all(f"\n  {name} " in HELP for name in ("train", "serve", *MODULES))


def test_an_unknown_command_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nanogrpo", "trian"])
    assert main() == 2
    names = "train, serve, chat, eval, merge, plan, plot, view, warmup"
    message = f"error: nanogrpo has no command trian: choose one of {names}.\n"
    assert capsys.readouterr().err == message
