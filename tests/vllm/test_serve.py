"""serve.py before it loads vLLM (options, secret, port, version), and access control as plain ASGI.

Needs no vLLM.
"""

from __future__ import annotations

import asyncio
import http.server
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import types
from pathlib import Path
from unittest import mock

import pytest

import serve
from nanogrpo.errors import UserError
from nanogrpo.vllm import auth
from nanogrpo.vllm import secret as stored
from nanogrpo.vllm.auth import INFO, LEASE, ROUTES, SECRET, TRAINER, AccessControl
from nanogrpo.vllm.server import Server
from tests.vllm.real import ROOT, ended

LONG = "0123456789abcdef"


# --- options ---


def test_unknown_options_go_to_vllm():
    ours, rest = serve.options(
        ["--model", "m", "--dtype", "float32", "--port", "1234", "--enforce-eager"]
    )
    assert (ours.model, ours.port, ours.host) == ("m", 1234, "127.0.0.1")
    assert rest == ["--dtype", "float32", "--enforce-eager"]


@pytest.mark.parametrize("option", sorted(serve.FIXED))
def test_options_that_training_relies_on_cannot_be_changed(option):
    for words in ([option, "x"], [f"{option}=x"]):
        with pytest.raises(UserError, match=f"{option} cannot be set: training relies on"):
            serve.options(["--model", "m", *words])


@pytest.mark.parametrize(
    "word",
    [
        "--logprobs_mode=raw_logprobs",
        "--logprobs-m",
        "--weight-transfer-config.backend",
        "--no-enable-scale-out",
    ],
)
def test_no_other_spelling_changes_them_either(word):
    """vLLM accepts underscores, abbreviations, keys of a dictionary, and negations."""
    with pytest.raises(UserError, match="cannot be set: training relies on"):
        serve.options(["--model", "m", word])


@pytest.mark.parametrize(
    "word", ["--api-key", "--api_key=x", "--api-k", "--config", "--conf", "--uds", "--ud=x", "--"]
)
def test_options_that_would_weaken_access_control_are_refused(word):
    with pytest.raises(UserError, match=f"^{serve.name_of(word)} cannot be used: ") as e:
        serve.options(["--model", "m", word, "a-secret"])
    assert "a-secret" not in str(e.value)


@pytest.mark.parametrize("word", ["--ssl-keyfile=x", "--ssl_certfile", "--enable-ssl-refresh"])
def test_options_for_encryption_are_refused(word):
    with pytest.raises(UserError, match="cannot be used: trainer and server speak plain HTTP"):
        serve.options(["--model", "m", word])


@pytest.mark.parametrize("word", ["--hos", "--ho", "--por=8001", "--host.x", "--mode", "--no-host"])
def test_our_own_options_cannot_be_set_for_vllm_by_another_spelling(word):
    """vLLM would read another address than the one that was checked."""
    name = {"h": "--host", "p": "--port", "m": "--model"}[word.removeprefix("--no-").lstrip("-")[0]]
    with pytest.raises(UserError, match=f"cannot be used: write {name} and its value"):
        serve.options(["--model", "m", word, "0.0.0.0"])


def test_an_empty_host_is_refused():
    """vLLM would listen on all addresses."""
    for words in (["--host", ""], ["--host="]):
        with pytest.raises(UserError, match="--host is empty: write an address, or leave"):
            serve.options(["--model", "m", *words])


def test_a_key_for_vllm_itself_is_ignored(monkeypatch):
    """vLLM would require it for completions, where trainers send our secret."""
    with mock.patch.dict(os.environ, {"VLLM_API_KEY": "x"}):
        serve.set_environment(LONG, [])
        assert "VLLM_API_KEY" not in os.environ
        assert os.environ[SECRET] == LONG


def test_options_of_vllm_with_longer_names_are_not_mistaken_for_ours():
    words = ["--model-impl", "vllm", "--max-model-len=9", "--hf-token", "-tp", "2", "--seed", "-1"]
    assert serve.options(["--model", "m", *words])[1] == words


@pytest.mark.parametrize("name", ["http://proxy", "proxy:80", "a,b", ""])
def test_allowed_hosts_are_names(name):
    with pytest.raises(UserError, match=f"--allowed-hosts {name} is no name; write it without"):
        serve.options(["--model", "m", "--allowed-hosts", "ok.example", name])
    ours, rest = serve.options(["--model", "m", "--allowed-hosts", "a", "b.c", "--dtype", "half"])
    assert (ours.allowed_hosts, rest) == (["a", "b.c"], ["--dtype", "half"])


GIB = 1 << 30
DEFAULTS = ["--no-enable-chunked-prefill", "--block-size", "32"]


def test_on_a_cpu_prompts_are_not_split_and_the_cache_takes_a_quarter_of_what_is_free(
    monkeypatch, capsys
):
    monkeypatch.delenv(serve.SPACE, raising=False)
    for free, size in ((8 * GIB, 2 * GIB), (1000 * GIB, 16 * GIB)):
        assert serve.cpu_options(["--dtype", "float32"], free) == [
            *DEFAULTS,
            "--kv-cache-memory-bytes",
            str(size),
        ]
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"serve: KV cache of {size / GIB:.1f} GiB, chosen from {free / GIB}")


@pytest.mark.parametrize(
    "word",
    [
        "--kv-cache-memory-bytes=1G",
        "--kv_cache_memory_bytes",
        "--gpu-memory-utilization=0.5",
        "--gpu-mem",
        "--device-memory-utilization",
    ],
)
def test_on_a_cpu_the_users_size_of_the_cache_is_kept(monkeypatch, capsys, word):
    monkeypatch.delenv(serve.SPACE, raising=False)
    assert serve.cpu_options([word, "1"], 8 * GIB) == DEFAULTS
    monkeypatch.setenv(serve.SPACE, "2")
    assert serve.cpu_options([], 8 * GIB) == DEFAULTS
    assert capsys.readouterr().err == ""


def test_on_a_cpu_the_users_blocks_are_kept(monkeypatch):
    monkeypatch.setenv(serve.SPACE, "2")
    assert serve.cpu_options(["--block-size", "64"], GIB) == DEFAULTS[:1]
    for word in ("--no-enable-chunked-prefill", "--no_enable_chunked_prefill"):
        assert serve.cpu_options([word], GIB) == DEFAULTS[1:]


@pytest.mark.parametrize(
    "word",
    ["--enable-chunked-prefill", "--enable_chunked_prefill", "--long-prefill-token-threshold=9"],
)
def test_on_a_cpu_options_that_split_a_prompt_are_refused(word):
    with pytest.raises(UserError, match=r"cannot be used on a CPU: .*; leave the option out"):
        serve.cpu_options([word], GIB)


def test_the_health_check_uses_no_proxy_and_works_with_ipv6(monkeypatch, capsys):
    """A proxy would see the secret, and its reply would end a healthy server."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    seen = []

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    class Server6(http.server.HTTPServer):
        address_family = socket.AF_INET6

    for kind, host in ((http.server.HTTPServer, "127.0.0.1"), (Server6, "::1")):
        with kind((host, 0), Health) as server:
            threading.Thread(target=server.handle_request, daemon=True).start()
            serve.wait_until_healthy(host, server.server_port, LONG, seconds=60.0)
        where = f"[{host}]" if ":" in host else host
        assert f"ready at http://{where}:{server.server_port} after" in capsys.readouterr().err
    assert seen == [("/health", f"Bearer {LONG}")] * 2


def test_a_server_that_ignores_sigterm_is_killed_with_its_workers():
    """vLLM ignores it while it loads. Its workers do not watch the server yet."""
    script = (
        "import os, signal, subprocess, serve\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\nserve.end(grace=0.2)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    worker = int(process.stdout.readline())
    assert process.wait(60) == -signal.SIGKILL
    assert ended([worker], within=60.0)


def test_a_port_in_use_is_reported():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError,
            match=rf"--port {port} of 127.0.0.1 cannot be used .*; choose another --port",
        ):
            serve.check_port("127.0.0.1", port)
    serve.check_port("127.0.0.1", port)
    with pytest.raises(UserError, match="cannot be used"):
        serve.check_port("127.0.0.1", 70000)


def test_a_missing_vllm_and_an_untested_version_are_refused(monkeypatch):
    versions: dict[str, str] = {}

    def version(name):
        if name not in versions:
            raise serve.importlib.metadata.PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(serve.importlib.metadata, "version", version)
    with pytest.raises(UserError, match=r"vLLM is not installed in .*; install vllm==0.32.0 there"):
        serve.check_vllm()
    versions["vllm"] = "0.33.0"
    with pytest.raises(
        UserError,
        match=r"vllm 0.33.0 is installed, but the sidecar was tested with 0.32.0; install that",
    ):
        serve.check_vllm()
    versions["vllm"] = "0.32.0+cpu"
    assert serve.check_vllm() == "0.32.0+cpu"


def test_an_error_is_one_sentence_with_status_2(tmp_path):
    done = subprocess.run(
        # this interpreter has no vLLM, or an empty model
        [sys.executable, str(ROOT / "serve.py"), "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: vLLM is not installed in")
    assert len(done.stderr.splitlines()) == 1


# --- the secret ---


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_without_a_secret_creates_one_that_its_user_can_read(monkeypatch, tmp_path, host):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(SECRET, "")  # as if it were not set
    secret, file = serve.find_secret(8000, None)
    assert len(secret) >= 32
    assert serve.find_secret(8001, None)[0] != secret
    assert file.read_text() == f"{secret}\n"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)]
    assert modes == [0o600, 0o700]
    assert [path.name for path in tmp_path.glob("state/*")] == ["nanogrpo"]
    assert len([*file.parent.iterdir()]) == 2  # no temporary file is left
    # a trainer on this machine finds it, and one on another machine is told the command
    assert Server("http://127.0.0.1:8000").headers["Authorization"] == f"Bearer {secret}"
    assert "Authorization" not in Server("http://gpu7:8000").headers
    ours, _ = serve.options(["--model", "a b", "--host", host])
    train = "python train.py --model 'a b' --engine vllm --server http://"
    if host == "127.0.0.1":
        assert serve.command(ours, file) == f"{train}127.0.0.1:8000"
    else:
        prefix = f"{SECRET}=$(head -n 1 {file}) "
        assert serve.command(ours, file) == f"{prefix}{train}{socket.gethostname()}:8000"


def test_the_command_for_a_trainer_names_the_users_own_secret(tmp_path):
    options = ["--model", "m", "--host", "::1", "--port", "81"]
    end = "python train.py --model m --engine vllm --server http://[::1]:81"
    assert serve.command(serve.options(options)[0], None) == f"{SECRET}=… {end}"
    ours, _ = serve.options([*options, "--secret-file", "my file"])
    assert serve.command(ours, None) == f"{SECRET}=$(head -n 1 'my file') {end}"


def test_the_secret_comes_from_a_file_or_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(SECRET, LONG)
    assert serve.find_secret(8000, None) == (LONG, None)
    file = tmp_path / "secret"
    file.write_text(f"  {LONG[::-1]}\nsecond line\n")
    assert serve.find_secret(8000, file) == (LONG[::-1], None)


def test_a_new_server_replaces_the_secret_of_an_old_one_but_not_of_a_running_one(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setattr(serve, "check_vllm", lambda: "0.32.0")
    with socket.create_server(("127.0.0.1", 0)) as running:
        port = running.getsockname()[1]
        secret, _ = stored.create(port)
        assert serve.main(["--model", "m", "--port", str(port)]) == 2
        assert f"--port {port} of 127.0.0.1 cannot be used" in capsys.readouterr().err
        assert stored.find(port) == secret
    assert serve.find_secret(port, None)[0] == stored.find(port) != secret


def test_a_server_that_is_still_loading_keeps_its_secret(monkeypatch, tmp_path):
    """Its port is free until it has loaded, or is taken on another address only."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(SECRET, raising=False)
    reader, writer = os.pipe()
    loading = os.fork()  # a new program would have to import torch
    if not loading:
        try:
            os.write(writer, stored.create(8000)[0].encode())
            signal.pause()
        finally:
            os._exit(1)
    try:
        secret = os.read(reader, 100).decode()
        with pytest.raises(UserError, match="--port 8000 belongs to another server of yours; end"):
            serve.find_secret(8000, None)
        assert stored.find(8000) == secret
        assert serve.find_secret(8001, None)[0] != secret
    finally:
        os.kill(loading, signal.SIGKILL)
        os.waitpid(loading, 0)
        os.close(reader)
        os.close(writer)
    assert serve.find_secret(8000, None)[0] == stored.find(8000) != secret


def test_the_umask_does_not_open_a_secret_to_others(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home" / "state"))
    before = os.umask(0)
    try:
        _, file = stored.create(8000)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file, *file.parents[:3])]
    assert modes == [0o600, 0o700, 0o700, 0o700]


def test_a_secret_is_never_stored_in_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "state")  # relative, so it does not count
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    _, file = serve.find_secret(8000, None)
    assert file.parent == tmp_path / "home" / ".local" / "state" / "nanogrpo"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home
    with pytest.raises(UserError, match=f"you have no home folder.*; set {SECRET} or --secret-f"):
        serve.find_secret(8000, None)
    assert stored.find(8000) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_the_users_secret_counts_more_than_a_stored_one(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stored.create(8000)
    assert Server("http://localhost:8000", LONG).headers["Authorization"] == f"Bearer {LONG}"


def damage(how: str, file: Path) -> None:
    if how in ("link", "pipe"):
        file.rename(file.with_suffix(".old"))
    if how == "link":
        file.symlink_to(file.with_suffix(".old"))
    elif how == "pipe":
        os.mkfifo(file, mode=0o600)
    elif how == "group":
        file.chmod(0o640)
    elif how == "writable":
        file.chmod(0o602)
    elif how == "folder":
        file.unlink()
        file.mkdir()


@pytest.mark.parametrize("how", ["link", "pipe", "group", "writable", "folder", "other owner"])
def test_a_stored_secret_that_others_could_know_or_have_made_is_refused(monkeypatch, tmp_path, how):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    _, file = stored.create(8000)
    damage(how, file)
    if how == "other owner":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match=rf"{file} .*; remove it, (and start|or set)"):
        Server("http://127.0.0.1:8000")


@pytest.mark.parametrize("how", ["open to others", "other owner", "a file"])
def test_a_secret_is_not_stored_where_others_could_replace_it(monkeypatch, tmp_path, how):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(SECRET, raising=False)
    folder = tmp_path / "nanogrpo"
    if how == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777 if how == "open to others" else 0o755)
    if how == "other owner":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    sentence = rf"A secret cannot be stored in {folder} \(.*\); set {SECRET} or --secret-file\."
    with pytest.raises(UserError, match=sentence):
        serve.find_secret(8000, None)


def test_a_secret_that_does_not_fit_on_the_disk_is_not_stored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stored.create(8000)
    before, secret = resource.getrlimit(resource.RLIMIT_FSIZE), stored.find(8000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(UserError, match=r"A secret cannot be stored in .*\(.*File too large\)"):
            stored.create(8000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stored.find(8000) == secret
    assert len([*stored.path_of(8000).parent.iterdir()]) == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"cannot be read \(.*\); name a text file with the secret in"),
        ("", "has an empty first line; write the secret there"),
        ("short", "must have at least 16 printable ASCII characters; use a longer one"),
        ("ünïcödé-ünïcödé-ünïcödé", "printable ASCII"),
    ],
)
def test_bad_secrets_are_refused(monkeypatch, tmp_path, content, sentence):
    monkeypatch.delenv(SECRET, raising=False)
    if content is not None:
        (tmp_path / "secret").write_text(content)
    with pytest.raises(UserError, match=sentence):
        serve.find_secret(8000, tmp_path / "secret")


# --- access control ---


def ask(
    control: AccessControl,
    path: str,
    method="POST",
    secret: str | None = LONG,
    kind="http",
    trainer="",
    headers=((b"host", b"127.0.0.1:8000"),),
):
    """Return the status and the body of the reply."""
    headers = [*headers]
    headers += [] if secret is None else [(b"authorization", b"Bearer " + secret.encode())]
    headers += [(TRAINER.lower().encode(), trainer.encode())] if trainer else []
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    app = types.SimpleNamespace(state=None)
    asyncio.run(
        control(
            {"type": kind, "path": path, "method": method, "headers": headers, "app": app},
            receive,
            send,
        )
    )
    return sent[0].get("status", sent[0]["type"]), sent[-1].get("body", b"")


@pytest.fixture
def control(monkeypatch):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setenv(SECRET, LONG)
    return AccessControl(app)


def test_requests_with_the_secret_are_let_in(control):
    for path, (method, _) in ROUTES.items():
        if path != INFO:
            assert ask(control, path, method) == (200, b"")
        for wrong in (None, "", LONG[:-1], LONG + "0", LONG.upper()):
            assert ask(control, path, method, secret=wrong)[0] == 401


def test_the_documented_routes_are_those_of_the_code():
    rows = [f"| `{method} {path}` | {use} |" for path, (method, use) in ROUTES.items()]
    table = "\n".join(rows)
    assert f"| --- | --- |\n{table}\n\n" in (ROOT / "docs" / "vllm.md").read_text()


def test_every_route_is_one_that_the_trainer_uses():
    """Except for the counters, which a person may watch."""
    sources = [ROOT / "nanogrpo" / "vllm" / f"{name}.py" for name in ("client", "server", "sync")]
    text = "".join(path.read_text() for path in sources)
    names = {auth.HEALTH: "HEALTH", auth.INFO: "INFO", auth.GENERATE: "GENERATE"}
    names |= {auth.CONNECT: "CONNECT", auth.DISCONNECT: "DISCONNECT"}
    unused = [
        path for path in ROUTES if f'"{path}' not in text and names.get(path, path) not in text
    ]
    assert unused == ["/metrics"]


def test_routes_that_sampling_does_not_need_are_closed(control):
    for path in (
        "/collective_rpc",
        "/weight_checker",
        "/",
        "/docs",
        "/HEALTH",
        "/health/",
        "//health",
        "/pause/../collective_rpc",
        "/%68ealth",
        "/is_sleeping",
        "/release_kv_cache_memory",
        "/reset_prefix_cache",
        "/v1/completions",
    ):
        for method in ("GET", "POST"):
            assert ask(control, path, method)[0] == 404
    assert ask(control, "/v1/realtime", kind="websocket")[0] == "websocket.close"


def test_the_server_describes_itself_to_trainers_with_the_secret(monkeypatch, control):
    async def describe(state) -> dict:
        return {"dtype": "float32"}

    monkeypatch.setattr("nanogrpo.vllm.auth.describe", describe)
    assert ask(control, INFO, method="GET") == (200, b'{"dtype": "float32"}')
    assert ask(control, INFO, method="GET", secret=None)[0] == 401


def test_one_trainer_at_a_time_holds_the_server(monkeypatch, control):
    """The first one holds it until it disconnects or its lease expires. Other clients need no
    lease.
    """
    now = [1000.0]
    monkeypatch.setattr("nanogrpo.vllm.auth.time.monotonic", lambda: now[0])

    def status(trainer, path="/health"):
        return ask(control, path, ROUTES[path][0], trainer=trainer)[0]

    assert status("b") == 200  # nobody is there yet
    assert status("a", "/init_weight_transfer_engine") == 200
    assert (status("b"), status("b", INFO), status("b", "/init_weight_transfer_engine")) == (
        409,
        409,
        409,
    )
    assert (status("a", "/pause"), status("", "/pause")) == (200, 200)
    now[0] += 0.9 * LEASE
    assert status("a") == 200
    now[0] += 0.9 * LEASE
    assert status("b") == 409
    now[0] += 0.2 * LEASE
    assert status("b", "/init_weight_transfer_engine") == 200
    assert status("a") == 409
    assert status("b", "/shutdown_weight_transfer_engine") == 200
    assert status("a", "/init_weight_transfer_engine") == 200


def test_an_installed_sidecar_imports_nanogrpo_but_not_its_neighbours(tmp_path):
    """A wheel has serve.py inside the package, next to the trainer's torch and other packages."""
    site = tmp_path / "site-packages"
    shutil.copytree(ROOT / "nanogrpo", site / "nanogrpo")
    (site / "nanogrpo" / "scripts").mkdir()
    shutil.copy(ROOT / "serve.py", site / "nanogrpo" / "scripts")
    (site / "argparse.py").write_text("raise ImportError('the neighbour was found')")
    start = (
        "import sys; sys.path = [p for p in sys.path if p != sys.argv[2]] + [sys.argv[1]]\n"
        "from pathlib import Path; from nanogrpo.vllm.server import Sidecar\n"
        "Sidecar('m', [], sys.executable, Path(sys.argv[1], 'serve.log')).start(5.0)"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", start, str(site), str(ROOT)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "vLLM is not installed in" in done.stderr, done.stderr + (site / "serve.log").read_text()
