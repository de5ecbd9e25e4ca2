"""The shape of the repository, held by reading it: who may import whom, and that the folder
`kernels/` shadows nobody.

A new file is entered in the table below first: what may it know? Read next: nanogrpo/kernels.py.
"""

import ast
import functools
import graphlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from transformers.utils import import_utils

ROOT = Path(__file__).parents[1]
PATTERNS = [
    "nanogrpo/**/*.py",
    "kernels/*.py",
    "bench/**/*.py",
    "tests/**/*.py",
    "examples/**/*.py",
    "*.py",
]
SOURCES = {str(p.relative_to(ROOT)): p for pattern in PATTERNS for p in sorted(ROOT.glob(pattern))}

# Each folder (or file) may import what stands before it, and itself.
ORDER = [
    "errors kernels __init__",
    "types config cli",
    "model",
    "data",
    "distributed",
    "rewards",
    "engine",
    "grpo",
    "vllm logs",
    "run",
    "resample",
    "step",
    "train",
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names.split()}
ALONE = {  # started by another interpreter or process, so they import only these of ours
    "serve.py": {"errors", "distributed.parent", "vllm.auth"},
    "nanogrpo/vllm/worker.py": {"distributed.parent", "vllm.buckets"},
    "nanogrpo/rewards/process.py": {
        "errors",
        "distributed.parent",
        "rewards.call",
        "rewards.builtin",
    },
}

# Where a library may appear at all (kernels, bench and tests stand for every file of the folder).
ONLY_IN = {
    "torch.distributed": "nanogrpo/distributed/ nanogrpo/vllm/ nanogrpo/run/state.py nanogrpo/run/memory.py"
    " nanogrpo/model/checkpoint.py bench/ tests/",
    "vllm": "serve.py nanogrpo/vllm/worker.py tests/",
    "transformers": "bench/ tests/ examples/",
    "peft": "tests/",
    "trl": "bench/ tests/",
    "triton": "kernels/ bench/ tests/",
    "flash_attn": "nanogrpo/model/attention.py bench/ tests/",
    "pyarrow": "nanogrpo/data/sources.py tests/",
    "wandb": "nanogrpo/logs/report.py tests/",
    "tensorboard": "nanogrpo/logs/report.py tests/",
    "matplotlib": "nanogrpo/logs/plot.py bench/",
}


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that a file names, wherever it does: `from a import b` gives a and a.b, and
    relative names are kernels'.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(
                filter(
                    None,
                    [
                        "nanogrpo.kernels" if node.level and path.parent.name == "kernels" else "",
                        node.module,
                    ],
                )
            )
            assert not node.level or path.parent.name == "kernels", f"{path}: a relative import"
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.add("torch.distributed")
    return found


def ours(path: Path) -> set[str]:
    """The modules of ours that a file imports, without the package's name: "model.decoder"."""
    found = set()
    for module in imports(path):
        first, _, rest = module.partition(".")
        if first in ("train", "serve"):
            found.add(first)
        parts = rest.split(".") if first == "nanogrpo" and rest else []
        while parts:  # `from a.b import c` names a.b.c, which may be a module or a thing in one
            base = ROOT / "nanogrpo" / "/".join(parts)
            if base.with_suffix(".py").exists() or parts[0] == "kernels":
                found.add(".".join(parts))
                break
            parts.pop()
    return found


def room(name: str) -> str:
    """The entry of ORDER that a file belongs to: a folder of the package, or the file's own name."""
    parts = Path(name).parts
    if parts[0] == "kernels":
        return "kernels"
    return parts[1] if len(parts) > 2 else Path(name).stem


PRODUCT = [n for n in SOURCES if n.startswith(("nanogrpo/", "kernels/")) or n == "train.py"]


@pytest.mark.parametrize("name", PRODUCT)
def test_each_folder_imports_only_what_comes_before_it(name):
    if room(name) == "kernels" and name != "nanogrpo/kernels.py":
        named = {module.split(".")[0] for module in imports(SOURCES[name])}
        assert named - set(sys.stdlib_module_names) <= {"torch", "triton", "nanogrpo"}
        assert all(module.startswith("kernels") for module in ours(SOURCES[name]))
    for module in ours(SOURCES[name]):
        other = module.split(".")[0]
        assert (
            other == room(name)
            or LEVEL[other] < LEVEL[room(name)]
            or (LEVEL[other] == LEVEL[room(name)] and LEVEL[other] <= 1)
        ), f"{name} imports {module}, which comes after it in ORDER"


@pytest.mark.parametrize("name", ALONE)
def test_files_that_other_interpreters_run_import_little(name):
    assert {m for m in ours(SOURCES[name]) if m} <= ALONE[name]


def test_no_two_files_import_each_other():
    graph = {n: ours(p) for n, p in SOURCES.items() if n in PRODUCT}
    names = {".".join(Path(n).with_suffix("").parts).removeprefix("nanogrpo."): n for n in graph}
    order = {n: {names[m] for m in modules if m in names} - {n} for n, modules in graph.items()}
    graphlib.TopologicalSorter(order).prepare()


@pytest.mark.parametrize("library", ONLY_IN)
def test_where_a_library_may_appear(library):
    users = {
        n
        for n, path in SOURCES.items()
        if any(f"{m}.".startswith(f"{library}.") for m in imports(path))
    }
    assert not [n for n in users if not n.startswith(tuple(ONLY_IN[library].split()))]


def test_the_reader_of_imports_reads_them_all(tmp_path):
    (tmp_path / "kernels").mkdir()
    path = tmp_path / "kernels" / "x.py"
    path.write_text(
        "import a.b as c\ndef f():\n    from d import e\nfrom .g import h\nfrom . import i\ntorch.distributed.get_rank()\n"
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


# ---- every file ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_says_what_it_is(name):
    text = SOURCES[name].read_text()
    assert ast.get_docstring(ast.parse(text)), "the first thing in a file is what it is"
    assert not re.search(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b", text)
    handlers = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ExceptHandler)]
    assert all(handler.type for handler in handlers), "a bare except"


# ---- the folder kernels/ and its name ------------------------------------------------------------


def test_no_file_takes_a_name_that_is_not_ours():
    assert not (ROOT / "kernels" / "__init__.py").exists()  # nanogrpo/kernels.py tells why
    assert not (ROOT / "bench" / "kernels.py").exists()  # run as a script it would be `kernels`
    assert not (ROOT / "tests" / "kernels.py").exists()


# Hugging Face's package, as far as transformers looks at it: any name is there, and says whose it
# is.
DECOY = """
DECOY = True
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda *_, **__: None, "__call__": lambda self, decorated: decorated})
"""

# In a worker that multiprocessing spawns, as vLLM does; the process that spawns it imports as
# little as possible.
PROBE = """
import importlib.util, multiprocessing, sys
from pathlib import Path

def check(folder):
    import kernels
    assert kernels.DECOY, kernels
    import nanogrpo.kernels.reference
    assert Path(nanogrpo.kernels.reference.__file__).parent == Path(folder), nanogrpo.kernels.reference
    assert list(nanogrpo.kernels.__path__) == [folder]
    import transformers
    assert transformers.utils.is_kernels_available()  # so the decoy is believed
    from transformers import Qwen3ForCausalLM
    from transformers.integrations import hub_kernels
    assert sys.modules["kernels"] is kernels
    assert "torch" in sys.modules

if __name__ == "__main__":
    import nanogrpo.kernels
    assert importlib.util.find_spec("nanogrpo.kernels.reference").origin == sys.argv[1] + "/reference.py"
    assert importlib.util.find_spec("kernels").origin == sys.argv[2] + "/kernels/__init__.py"
    worker = multiprocessing.get_context("spawn").Process(target=check, args=(sys.argv[1],))
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
"""


def probe(tmp_path: Path, code: Path, folder: Path, site: Path) -> None:
    """Runs PROBE with `code` before `site` on the path, where a package `kernels` is installed."""
    (site / "kernels" / "layer").mkdir(parents=True)
    for module in ("__init__.py", "layer/__init__.py", "layer/mode.py"):
        (site / "kernels" / module).write_text(DECOY)
    version = import_utils.KERNELS_MIN_VERSION
    info = site / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    # how transformers finds whose package it is
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    (tmp_path / "probe.py").write_text(PROBE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, dict.fromkeys([code, site])))}
    argv = [sys.executable, str(tmp_path / "probe.py"), str(folder), str(site)]
    done = subprocess.run(argv, env=env, cwd=code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_folder_kernels_shadows_nothing_in_a_checkout(tmp_path):
    probe(tmp_path, ROOT, ROOT / "kernels", tmp_path / "site")


def test_the_folder_kernels_shadows_nothing_when_installed(tmp_path):
    """A wheel, unpacked as pip does, with Hugging Face's package beside it in the same
    site-packages.
    """
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md", "train.py", "serve.py"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ("nanogrpo", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    argv = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    subprocess.run(
        [*argv, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {p.name for p in (site / "nanogrpo" / "kernels").iterdir()} == {
        p.name for p in (ROOT / "kernels").glob("*.py")
    }
    assert {p.name for p in site.iterdir() if p.suffix != ".dist-info"} <= {
        "nanogrpo",
        "train.py",
        "serve.py",
    }
    probe(tmp_path, site, site / "nanogrpo" / "kernels", site)
