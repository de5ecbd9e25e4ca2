"""The functions, parameters and routes of vLLM that our code uses exist in the installed vLLM.

Its source is read, and nothing of it is imported. So this covers what only a GPU runs, too. Read
next: test_real.py.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from nanogrpo.vllm import auth
from tests.vllm import real

pytestmark = pytest.mark.vllm
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def site_packages() -> Path:
    real.require()
    (found,) = Path(real.PYTHON).absolute().parents[1].glob("lib/python*/site-packages/vllm")
    return found.parent


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def named(nodes: Iterable[ast.AST], name: str) -> ast.AST | None:
    """Return the first of these statements that defines or imports a name."""
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return node
    return None


def find(module: str, name: str) -> ast.AST:
    """Return the definition of a name in one of vLLM's modules, or where that imports it from."""
    path = site_packages() / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = named(ast.walk(parsed(path)), name)  # of the outermost statements first
    if isinstance(found, ast.ImportFrom):
        package = ".".join(path.relative_to(site_packages()).parts[:-1])
        return find(f"{package}.{found.module}" if found.level else f"{found.module}", name)
    assert found, f"{module} has no {name}"
    return found


def signature(function: ast.AST) -> inspect.Signature:
    """Return the parameters of a function, or of a class that defines __init__."""
    if isinstance(function, ast.ClassDef):
        function = named(function.body, "__init__")
    assert isinstance(function, Function)
    for arg in ast.walk(function.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    defaults = function.args.defaults
    function.args.defaults = [ast.Constant(None) for _ in defaults]
    function.args.kw_defaults = [x and ast.Constant(None) for x in function.args.kw_defaults]
    return inspect.signature(eval(f"lambda {ast.unparse(function.args)}: None"))


@pytest.mark.parametrize("name", ["serve.py", "nanogrpo/vllm/worker.py"])
def test_what_we_import_exists_and_takes_the_arguments_that_we_pass(name):
    nodes, found = [*ast.walk(parsed(real.ROOT / name))], {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("vllm."):
            found |= {alias.name: find(node.module, alias.name) for alias in node.names}
    for node in nodes:  # members of imported classes
        if isinstance(node, ast.Attribute) and isinstance(
            owner := found.get(ast.unparse(node.value)), ast.ClassDef
        ):
            found[ast.unparse(node)] = named(owner.body, node.attr)
            assert found[ast.unparse(node)], ast.unparse(node)
    calls = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) in found]
    assert len(calls) > 4
    for call in calls:
        parameters = signature(found[ast.unparse(call.func)])
        own = [p for p in list(parameters.parameters)[:1] if p in ("self", "cls")]
        parameters.bind(*own, *call.args, **{k.arg: k.value for k in call.keywords if k.arg})


def test_our_weight_transfer_engine_fits_vllms_base_class():
    ours = named(parsed(real.ROOT / "nanogrpo/vllm/worker.py").body, "Transfer")
    base = find("vllm.distributed.weight_transfer.base", "WeightTransferEngine")
    mine, theirs = ({n.name: n for n in c.body if isinstance(n, Function)} for c in (ours, base))
    abstract = {
        n for n, f in theirs.items() if "abstractmethod" in map(ast.unparse, f.decorator_list)
    }
    assert len(abstract) == 5
    assert abstract <= mine.keys()
    for name in mine.keys() & theirs.keys():
        assert len(mine[name].args.args) == len(theirs[name].args.args), name
    stored = {ast.unparse(n) for n in ast.walk(theirs["__init__"]) if isinstance(n, ast.Attribute)}
    assert {f"self.{n}" for n in ("device", "model", "model_config", "parallel_config")} <= stored


@functools.cache
def routes() -> dict[tuple[str, str], ast.AST]:
    """Return vLLM's handlers by method and path."""
    found = {}
    for path in (site_packages() / "vllm/entrypoints").rglob("*.py"):
        if "@router." not in path.read_text():
            continue
        for node in ast.walk(parsed(path)):
            for decorator in getattr(node, "decorator_list", []):
                match decorator:
                    case ast.Call(ast.Attribute(attr=method), [ast.Constant(route), *_]):
                        found[method.upper(), route] = node
    return found


def test_vllm_has_the_routes_that_we_open():
    others = {auth.INFO, "/metrics"}  # our own, and that of Prometheus' client
    for path, (method, _) in auth.ROUTES.items():
        assert path in others or (method, path) in routes(), path


def test_the_routes_of_a_sync_take_the_parameters_that_we_send():
    sent: dict[str, set[str]] = {}
    for node in ast.walk(parsed(real.ROOT / "nanogrpo/vllm/sync.py")):
        match node:
            case ast.Call(ast.Attribute(attr="post"), [ast.Constant(str(url)), *body]):
                keys = {key.value for x in body if isinstance(x, ast.Dict) for key in x.keys}
                parts = urlsplit(url)
                sent.setdefault(parts.path, set()).update(keys, parse_qs(parts.query))
    assert sent["/sleep"] == {"level", "mode"}
    assert sent["/finish_weight_update"] == {"weight_version"}
    for path, names in sent.items():
        handler = routes()["POST", path]
        words = {n.arg for n in ast.walk(handler) if isinstance(n, ast.arg)}
        words |= {n.value for n in ast.walk(handler) if isinstance(n, ast.Constant)}  # getlist("…")
        assert names <= words, path
