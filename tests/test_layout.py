"""The shape of the repository, held by reading it: who may import whom, and that the folder `kernels/` shadows nobody.

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
FOLDERS = {"nanogrpo": "nanogrpo/*.py", "kernels": "kernels/*.py", "bench": "bench/**/*.py", "tests": "tests/**/*.py", "": "*.py"}
SOURCES = {str(p.relative_to(ROOT)): p for pattern in FOLDERS.values() for p in sorted(ROOT.glob(pattern))}

# What each file of the package may import of ours, beside errors.py, which everybody may.
MAY_IMPORT = {
    "__init__": "",
    "errors": "",
    "batch": "",
    "rules": "",
    "config": "rules",
    "profiles": "",
    "cli": "config profiles",
    "kernels": "",
    "custom_ops": "kernels",
    "ops": "custom_ops kernels",
    "attention": "kernels",
    "model": "ops attention config batch",
    "objectives": "config kernels",
    "grpo": "batch config ops objectives",
    "entropy": "batch config ops world",
    "packing": "batch config grpo",
    "mismatch": "config kernels",
    "tokenizer": "",
    "tasks": "",
    "rows": "tasks",
    "data": "batch tokenizer rows",
    "rewards": "plugin",
    "reward_call": "",
    "reward_process": "reward_call rewards",  # imports no torch: another process starts in a tenth of a second
    "reward_runner": "batch reward_call reward_model reward_process rewards",
    "reward_model": "attention checkpoint model tokenizer",
    "rollout": "batch",
    "turns": "batch rollout tokenizer",
    "calculator": "batch turns",
    "plugin": "",
    "resample": "batch rollout run",
    "experience": "batch config entropy grpo lora mismatch model packing resample reward_call run",
    "draw": "rollout",
    "local_engine": "lora model attention batch rollout draw",
    "guard": "",
    "server": "ends guard",
    "vllm_protocol": "batch guard model rollout server",
    "vllm_engine": "batch rollout ends guard server sync vllm_protocol",  # speaks HTTP: vLLM itself is another process's
    "staleness": "batch rollout",
    "wire": "guard",  # both ends of the weight sync read it, and one of them has neither our model nor our config
    "engine_worker": "wire",
    "sync": "guard wire server lora",
    "ends": "",
    "lora": "model config ops",
    "world": "batch config ends",
    "fsdp": "model config world",
    "optim": "config",
    "checkpoint": "model tokenizer lora",
    "adapters": "checkpoint lora model config",
    "output": "batch checkpoint config world",
    "trace": "config world",
    "state": "adapters checkpoint ends fsdp output world model config tokenizer",
    "memory": "lora world model config ops packing",
    "run": "adapters batch entropy checkpoint config data fsdp guard local_engine log lora memory model optim output plugin"
    " reward_runner rollout rows server staleness state tokenizer turns vllm_engine warmup world",
    "metrics": "batch mismatch ops world",
    "report": "config",
    "completions": "batch config world",
    "log": "__init__ completions config metrics report world",
    "plot": "",
    "warmup": "checkpoint grpo optim packing model tasks tokenizer batch config",
    "serve": "guard",
}
NOT_BY_TRAIN = {"engine_worker", "serve", "warmup", "plot"}

# Where a library may appear at all (kernels, bench and tests stand for every file of the folder).
ONLY_IN = {
    "torch.distributed": "ends world fsdp state memory sync wire engine_worker checkpoint train bench tests",
    "vllm": "serve engine_worker tests",
    "transformers": "bench tests",
    "peft": "tests",
    "trl": "bench tests",
    "triton": "kernels bench tests",
    "flash_attn": "attention bench tests",
    "pyarrow": "rows tests",
    "wandb": "report tests",
    "tensorboard": "report tests",
    "matplotlib": "plot bench",
}


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that a file names, wherever it does: `from a import b` gives a and a.b, and relative names are kernels'."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(
                filter(None, ["nanogrpo.kernels" if node.level and path.parent.name == "kernels" else "", node.module])
            )
            assert not node.level or path.parent.name == "kernels", f"{path}: a relative import"
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.add("torch.distributed")
    return found


def place(name: str) -> str:
    """What the tables call a file: its stem, or its folder where all files are alike."""
    folder = name.split("/")[0] if "/" in name else ""
    return folder if folder in ("kernels", "bench", "tests") else Path(name).stem


def ours(path: Path) -> set[str]:
    """The files of the package that a file imports; what is imported from a package itself counts as `__init__`."""
    found = set()
    for module in imports(path):
        first, _, rest = module.partition(".")
        if first == "nanogrpo" and rest:
            stem = rest.split(".")[0]
            found.add(stem if (ROOT / "nanogrpo" / f"{stem}.py").exists() else "__init__")
        elif first in ("train", "serve"):
            found.add(first)
    return found


@pytest.mark.parametrize("name", [n for n in SOURCES if place(n) not in ("bench", "tests", "setup")])
def test_who_may_import_whom(name):
    if place(name) == "kernels":
        named = {module.split(".")[0] for module in imports(SOURCES[name])} - set(sys.stdlib_module_names)
        assert named <= {"torch", "triton", "nanogrpo"}
        assert ours(SOURCES[name]) <= {"kernels"}
    elif name == "train.py":
        assert not ours(SOURCES[name]) & NOT_BY_TRAIN
    else:
        assert place(name) in MAY_IMPORT, f"{name} is not in the table of who may import whom"
        assert ours(SOURCES[name]) <= {*MAY_IMPORT[place(name)].split(), "errors"}


def test_the_table_has_no_circles():
    graphlib.TopologicalSorter({name: allowed.split() for name, allowed in MAY_IMPORT.items()}).prepare()


@pytest.mark.parametrize("library", ONLY_IN)
def test_where_a_library_may_appear(library):
    users = {n for n, path in SOURCES.items() if any(f"{m}.".startswith(f"{library}.") for m in imports(path))}
    assert not {n for n in users if place(n) not in ONLY_IN[library].split()}


def test_the_reader_of_imports_reads_them_all(tmp_path):
    (tmp_path / "kernels").mkdir()
    path = tmp_path / "kernels" / "x.py"
    path.write_text(
        "import a.b as c\ndef f():\n    from d import e\nfrom .g import h\nfrom . import i\ntorch.distributed.get_rank()\n"
    )
    expected = {"a.b", "d", "d.e", "nanogrpo.kernels.g", "nanogrpo.kernels.g.h", "nanogrpo.kernels", "nanogrpo.kernels.i"}
    assert imports(path) == {*expected, "torch.distributed"}


# ---- every file ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_says_what_it_is_and_stays_short(name):
    text = SOURCES[name].read_text()
    assert ast.get_docstring(ast.parse(text)), "the first thing in a file is what it is"
    assert text.count("\n") <= 300, "an afternoon's reading is made of files of one sitting"
    assert not re.search(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b", text)
    handlers = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ExceptHandler)]
    assert all(handler.type for handler in handlers), "a bare except"


# ---- the folder kernels/ and its name ------------------------------------------------------------------------------------------


def test_no_file_takes_a_name_that_is_not_ours():
    assert not (ROOT / "kernels" / "__init__.py").exists()  # nanogrpo/kernels.py tells why
    assert not (ROOT / "bench" / "kernels.py").exists()  # run as a script it would be `kernels`
    assert not (ROOT / "tests" / "kernels.py").exists()


# Hugging Face's package, as far as transformers looks at it: any name is there, and says whose it is.
DECOY = """
DECOY = True
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda *_, **__: None, "__call__": lambda self, decorated: decorated})
"""

# In a worker that multiprocessing spawns, as vLLM does; the process that spawns it imports as little as possible.
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
    (info / "RECORD").write_text("kernels/__init__.py,,\n")  # how transformers finds whose package it is
    (tmp_path / "probe.py").write_text(PROBE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, dict.fromkeys([code, site])))}
    argv = [sys.executable, str(tmp_path / "probe.py"), str(folder), str(site)]
    done = subprocess.run(argv, env=env, cwd=code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_folder_kernels_shadows_nothing_in_a_checkout(tmp_path):
    probe(tmp_path, ROOT, ROOT / "kernels", tmp_path / "site")


def test_the_folder_kernels_shadows_nothing_when_installed(tmp_path):
    """A wheel, unpacked as pip does, with Hugging Face's package beside it in the same site-packages."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md", "train.py", "serve.py"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ("nanogrpo", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*argv, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {p.name for p in (site / "nanogrpo" / "kernels").iterdir()} == {p.name for p in (ROOT / "kernels").glob("*.py")}
    assert {p.name for p in site.iterdir() if p.suffix != ".dist-info"} <= {"nanogrpo", "train.py", "serve.py"}
    probe(tmp_path, site, site / "nanogrpo" / "kernels", site)
