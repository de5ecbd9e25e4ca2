"""Tests of the layout: who may import whom, what a wheel contains, and the name of kernels/.

A new folder first gets a place in ORDER. Read next: nanogrpo/kernels.py.
"""

import ast
import dataclasses
import functools
import graphlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tokenize
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers.utils import import_utils

from nanogrpo import config
from nanogrpo.extras import attach, options
from nanogrpo.extras.commands import HELP, MODULES, main, script

ROOT = Path(__file__).parents[1]
FOLDERS = ["nanogrpo", "kernels", "bench", "tests", "examples", "exercises", "docs"]
PATTERNS = [*(f"{folder}/**/*.py" for folder in FOLDERS), "*.py"]
SOURCES = {str(p.relative_to(ROOT)): p for pattern in PATTERNS for p in sorted(ROOT.glob(pattern))}

# The core: each folder (or file) may import itself and those on the lines above.
ORDER = [
    "errors kernels",
    "types config cli feature",
    "model",
    "data",
    "distributed",
    "rewards",
    "engine",
    "grpo",
    "logs",
    "run",
    "step",
    "train",
    "vllm extras",  # not the core
    "__init__ __main__",
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names.split()}
# The front doors, which alone may import extras: all that they import is a table of contents.
DOORS = {
    "train.py": {"extras.attach"},
    "nanogrpo/__init__.py": {"extras.api", "extras.options"},
    "nanogrpo/__main__.py": {"extras.commands"},
}
# What the core does not know of. Only a pointer ("Read next: …") may name it.
FOREIGN = re.compile(
    r"\b(lora\w*|adapters?|nf4|4.?bits?|four.bits?|vision|images?|pictures?|tools?|vllm\w*|sidecars?"
    r"|rollouts?|cispo|sapo|vespo|dppo\w*|gspo|rloo|maxrl|gdpo|staleness|resampl\w*|wandb|trackio"
    r"|tensorboard|torchao|bitsandbytes|peft|datasets|reasoning_gym|viewer)\b",
    re.IGNORECASE,
)
# Sizes in code tokens: names, operators, numbers and strings, but no comments. A number may fall at
# any time, but rise only together with a sentence in docs/log.md that says what a reader gets for
# it.
BUDGETS = {"core": 42_000, "kernels": 19_500, "path": 17_500, "product": 130_750, "tests": 200_000}
# From the loop to the loss, the head, the model and the engine on a CPU.
PATH = """
    train.py nanogrpo/types.py nanogrpo/step.py
    nanogrpo/grpo/advantages.py nanogrpo/grpo/loss.py nanogrpo/grpo/schedule.py
    nanogrpo/grpo/packing.py
    nanogrpo/model/head.py nanogrpo/model/decoder.py nanogrpo/model/attention.py
    nanogrpo/model/dispatch.py nanogrpo/model/rope.py
    nanogrpo/model/hf_config.py
    nanogrpo/engine/base.py nanogrpo/engine/local.py nanogrpo/engine/scheduler.py
    nanogrpo/engine/runner.py nanogrpo/engine/cache.py nanogrpo/engine/sampler.py
    kernels/head.py kernels/linear.py
    kernels/reference/policy.py kernels/reference/log_softmax.py kernels/reference/fused_rows.py
    kernels/reference/norm.py kernels/reference/rope.py kernels/reference/swiglu.py
    kernels/reference/gather.py kernels/reference/sample.py kernels/reference/attention.py
"""
# Other interpreters and processes start these files, so they import little else of the project.
ALONE = {
    "serve.py": {"errors", "vllm.auth", "vllm.process"},
    "nanogrpo/vllm/worker.py": {"vllm.buckets", "vllm.process"},
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
    " nanogrpo/extras/lora/nf4.py nanogrpo/extras/optim.py"
    " nanogrpo/extras/memory.py nanogrpo/extras/trl_objects.py nanogrpo/model/checkpoint.py bench/"
    " tests/",
    "vllm": "serve.py nanogrpo/vllm/worker.py tests/",
    "uvicorn": "tests/",
    "transformers": "nanogrpo/extras/tools/calls.py bench/ tests/ examples/",
    "peft": "tests/",
    "trl": "bench/ tests/",
    "triton": "kernels/ nanogrpo/extras/lora/nf4_kernels.py bench/ tests/ examples/ exercises/",
    "flash_attn": "nanogrpo/extras/two_calls.py bench/ tests/",
    "math_verify": "nanogrpo/rewards/symbolic.py",
    "pyarrow": "nanogrpo/data/sources.py tests/",
    "PIL": "nanogrpo/extras/vision/ tests/ examples/ bench/ docs/img/view.py",
    "datasets": "nanogrpo/extras/data/hub.py bench/ tests/",
    "reasoning_gym": "nanogrpo/extras/gym/data.py tests/",
    "torchao": "nanogrpo/extras/optim.py tests/",
    "bitsandbytes": "bench/ tests/",
    "yaml": "nanogrpo/extras/commandline.py",
    "wandb": "nanogrpo/extras/dashboards.py tests/",
    "trackio": "nanogrpo/extras/dashboards.py tests/",
    "tensorboard": "nanogrpo/extras/dashboards.py tests/",
    "matplotlib": "nanogrpo/extras/plot.py bench/ examples/ docs/img/",
}


@functools.cache
def imports(path: Path) -> set[str]:
    """Return every module that a file imports when it runs, also inside functions.

    `from a import b` gives a and a.b. Only kernels/ may use relative imports. Imports below `if
    TYPE_CHECKING:` are not counted: only a type checker makes them.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ""
            if node.level:
                assert "kernels" in path.parent.parts, f"{path}: a relative import"
                folders = path.parent.parts[path.parts.index("kernels") :]
                package = ".".join(["nanogrpo", *folders[: len(folders) + 1 - node.level]])
            module = ".".join(filter(None, [package, node.module]))
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
CORE = [n for n in PRODUCT if entry(n) not in ("kernels", "vllm", "extras")]


@pytest.mark.parametrize("name", PRODUCT)
def test_each_folder_imports_only_folders_above_it(name):
    if entry(name) == "kernels" and name != "nanogrpo/kernels.py":
        named = {module.split(".")[0] for module in imports(SOURCES[name])}
        assert named - set(sys.stdlib_module_names) <= {"torch", "triton", "nanogrpo"}
        assert all(module.startswith("kernels") for module in ours(SOURCES[name]))
    for module in ours(SOURCES[name]) - DOORS.get(name, set()):
        other, own = LEVEL[module.split(".")[0]], LEVEL[entry(name)]
        same = module.split(".")[0] == entry(name) or own <= 1 or entry(name) in ("vllm", "extras")
        assert other < own or (other == own and same), f"{name} imports {module}"


@pytest.mark.parametrize("name", CORE)
def test_the_core_does_not_name_what_is_off_by_default(name):
    """Neither in code nor in comments, so that a reader of the core need not know of it."""
    pointers = re.compile(r"Read (next|before):.*?(\n\n|\"\"\"|$)", re.DOTALL)
    lines = pointers.sub("", SOURCES[name].read_text()).splitlines()
    # The names of the variables that every chat template is given.
    protocol = ("VARIABLES = ", 'for name in ("enable_thinking", "tools",')
    found = [line for line in lines if FOREIGN.search(line)]
    assert not [line for line in found if not line.strip().startswith(protocol)]


def test_a_default_run_loads_no_extra(tmp_path):
    options = f"--profile debug --device cpu --output-dir {tmp_path}/run"
    program = (
        "import sys, train\n"
        f"assert train.main({options.split()!r}) == 0\n"
        "names = ('nanogrpo.extras.', 'nanogrpo.vllm')\n"
        "loaded = {name for name in sys.modules if name.startswith(names)}\n"
        "assert loaded == {'nanogrpo.extras.attach'}, loaded\n"
    )
    run("-c", program, cwd=ROOT, path=[ROOT])


def test_programs_that_only_read_a_log_start_without_torch():
    names = ", ".join(MODULES[name] for name in ("view", "plot", "runs"))
    program = f"import {names}, sys; sys.exit('torch' in sys.modules)"
    run("-c", program, cwd=ROOT, path=[ROOT])


@pytest.mark.parametrize("options", [[], ["train", "--help-all"]])
def test_the_help_ends_quietly_if_its_reader_has_ended(options):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nanogrpo", *options]
    with os.fdopen(writer) as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def size(names: Sequence[str]) -> int:
    """Return the number of code tokens of files."""
    count = 0
    for name in names:
        with SOURCES[name].open("rb") as file:
            count += sum(token.type in TOKENS for token in tokenize.tokenize(file.readline))
    return count


TOKENS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}


def sizes() -> dict[str, int]:
    """Return the sizes of the parts that have a budget."""
    parts = {
        "core": CORE,
        "kernels": [n for n in SOURCES if n.startswith("kernels/")],
        "path": [n for n in SOURCES if n.startswith(tuple(PATH.split()))],
        "product": [*PRODUCT, "serve.py"],
        "tests": [n for n in SOURCES if n.startswith("tests/")],
    }
    return {part: size(names) for part, names in parts.items()}


def test_every_part_keeps_the_budget_that_the_log_states():
    found = sizes()
    assert {part: n for part, n in found.items() if n > BUDGETS[part]} == {}
    log = (ROOT / "docs/log.md").read_text()
    limits = re.findall(r"^\| (\w+)/? \| [\d,]+ \| ([\d,]+) \|", log, re.MULTILINE)
    assert {part: int(n.replace(",", "")) for part, n in limits} == {
        part: n for part, n in BUDGETS.items() if part != "path"
    }


def test_the_readme_states_the_sizes():
    text = (ROOT / "README.md").read_text()
    for part in ("core", "path"):
        stated = re.search(rf"the {part} has ([\d,]+) code tokens", text, re.IGNORECASE)
        assert stated, f"README.md does not state the size of the {part}"
        assert abs(int(stated[1].replace(",", "")) - sizes()[part]) <= 100


def test_the_help_is_short(capsys):
    with pytest.raises(SystemExit):
        attach.parse(["--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 130


def test_the_options_are_few():
    assert len(dataclasses.fields(config.Config)) <= 55
    assert len(dataclasses.fields(options.Config)) <= 110


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
    assert Path(nanogrpo.kernels.reference.__file__).parent == Path(folder, "reference")
    assert list(nanogrpo.kernels.__path__) == [folder]
    import transformers
    assert transformers.utils.is_kernels_available()  # transformers takes the decoy for the package
    from transformers import Qwen3ForCausalLM
    from transformers.integrations import hub_kernels
    assert sys.modules["kernels"] is kernels

if __name__ == "__main__":
    import nanogrpo.kernels
    reference = importlib.util.find_spec("nanogrpo.kernels.reference")
    assert reference.origin == sys.argv[1] + "/reference/__init__.py"
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
    assert reference == sys.path[1] + "/nanogrpo/kernels/reference/__init__.py", reference
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
    modules |= {f"nanogrpo/{p.relative_to(ROOT)}" for p in ROOT.glob("kernels/**/*.py")}
    modules |= {"nanogrpo/scripts/train.py", "nanogrpo/scripts/serve.py"}
    assert {str(p.relative_to(site)) for p in site.rglob("*.py")} == modules
    assert (site / "nanogrpo" / "py.typed").exists()
    assert (site / "nanogrpo/extras/view/view.html").exists()
    assert [p.name for p in site.iterdir() if p.suffix != ".dist-info"] == ["nanogrpo"]

    write_decoy(site)
    assert "train a model with GRPO" in run("-m", "nanogrpo", cwd=tmp_path, path=[site])
    for name, option in {"train": "--num-generations", "serve": "--owner"}.items():
        assert option in run("-c", COMMAND, name, "--help", cwd=tmp_path, path=[site])


def test_the_commands_of_a_checkout_are_its_own_files():
    assert script("train.py") == ROOT / "train.py"
    assert script("serve.py") == ROOT / "serve.py"
    assert all(importlib.util.find_spec(module) for module in MODULES.values())
    assert all(f"\n  {name} " in HELP for name in ("train", "serve", *MODULES))


def test_an_unknown_command_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nanogrpo", "trian"])
    assert main() == 2
    assert capsys.readouterr().err == "error: nanogrpo has no command trian: see --help.\n"
