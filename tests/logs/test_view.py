"""What `nanogrpo view` reads and writes, and what its server answers; without a browser.

Read before: test_completions.py. Read next: test_view_page.py.
"""

import base64
import gzip
import http.client
import itertools
import json
import math
import os
import re
import subprocess
import sys

import pytest

from nanogrpo.extras import commands
from nanogrpo.extras.view import server as server_module
from nanogrpo.extras.view.data import Run
from nanogrpo.extras.view.server import TEMPLATE, Server
from tests.conftest import read_rows, write_rows
from tests.logs.conftest import serving, write_run


def written(folder) -> dict[str, list]:
    """Return the lines of each block in the page of a run; of the index, its only line. A picture
    is a block without lines.
    """
    assert commands.main(["view", str(folder)]) == 0
    page = (folder / "view.html").read_text()
    found = re.findall(r'<script type="text/plain" id="([^"]+)">([\w+/=]*)</script>', page)
    data = {name: base64.b64decode(text) for name, text in found}
    return {
        name: x if "/p" in name else [*map(json.loads, gzip.decompress(x).decode().splitlines())]
        for name, x in data.items()
    }


def test_a_page_has_the_curves_and_every_completion_and_token(tmp_path):
    write_run(tmp_path, steps=3, options={"entropy": "entropy", "seed": 0, "max_steps": 3})
    found = written(tmp_path)
    (run,) = found["index"][0]
    assert run["curves"]["reward"] == {"x": [1, 2, 3], "y": [0, 1 / 3, 2 / 3]}
    assert run["curves"]["eval/reward"] == {"x": [0], "y": [0.25]}
    assert run["about"] == {"--entropy": "entropy", "--seed": "0", "--max-steps": "3"}
    assert run["set"] == ["--entropy", "--max-steps"]
    assert run["blocks"] == {
        "c": [[step, [[0, 2, 1.0], [1, 2, 1.0]]] for step in (1, 2, 3)],
        "e": [[0, [[0, 1, 0.25]]]],
    }
    assert run["prompts"] == ["first?", "second?"]
    assert (run["tokens"], run["notes"]) == ([1, 2, 3], [])
    assert {*found} == {"index", "0/c1", "0/c2", "0/c3", "0/e0", "0/t1", "0/t2", "0/t3"}
    for step in (1, 2, 3):
        path = tmp_path / "completions" / f"completions_{step:05d}.jsonl"
        for row, logged in zip(found[f"0/c{step}"], read_rows(path), strict=True):
            assert row["completion"] == logged["completion"]
            assert row["advantage"] == logged["advantage"]
            assert (row["answer"], row["more"]) == ("7", {"ok": "ok"})
        tokens = gzip.decompress(path.with_name(f"tokens_{step:05d}.jsonl.gz").read_bytes())
        assert found[f"0/t{step}"] == [json.loads(line) for line in tokens.splitlines()]


PICTURES = [b"RIFF....WEBP first", b"RIFF....WEBP second"]


def test_prompts_that_differ_only_in_their_pictures_are_apart(tmp_path):
    write_run(tmp_path, steps=1, prompt="second?", pictures=PICTURES)
    path = tmp_path / "completions/completions_00001.jsonl"
    text = path.read_text().replace('[{"role": "user", "content": "second?"}]', '"second?"')
    path.write_text(text)
    (tmp_path / f"completions/pictures/{7:016x}.webp").write_bytes(b"not shown")
    found = written(tmp_path)
    (run,) = found["index"][0]
    assert run["prompts"] == ["second?", "second?"]
    assert run["blocks"]["c"] == [[1, [[0, 2, 1.0], [1, 2, 1.0]]]]
    assert {name: data for name, data in found.items() if "/p" in name} == {
        f"0/p{i:016x}": data for i, data in enumerate(PICTURES)
    }
    (tmp_path / f"completions/pictures/{0:016x}.webp").unlink()  # the page says that it is missing
    assert commands.main(["view", str(tmp_path)]) == 0


def test_a_long_run_has_steps_at_equal_distances_and_the_last_one(tmp_path, monkeypatch):
    write_run(tmp_path, steps=20)
    size = sum(p.stat().st_size for p in (tmp_path / "completions").iterdir())
    monkeypatch.setattr(server_module, "LIMIT", size // 4)
    found = written(tmp_path)
    kept = [step for step, _ in found["index"][0][0]["blocks"]["c"]]
    assert 20 in kept
    assert 4 <= len(kept) <= 12
    assert len({b - a for a, b in itertools.pairwise(kept)}) == 1
    assert {f"0/c{step}" for step in kept} <= {*found}
    (note,) = found["index"][0][0]["notes"]
    assert f"the completions of {len(kept)} of the 21 steps" in note


def test_the_page_of_two_runs_has_its_own_name_and_opens_in_the_browser(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, steps=1)
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    runs = str(tmp_path / "a"), str(tmp_path / "b")
    argv = [sys.executable, "-m", "nanogrpo", "view", *runs, "--open"]
    env = os.environ | {"BROWSER": f"{browser} %s"}
    printed = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout
    address = (tmp_path / "a/view_b.html").as_uri()
    assert printed.startswith(f"{address} (")
    assert (tmp_path / "opened").read_text() == f"{address}\n"
    assert not (tmp_path / "a/view.html").exists()


def test_numbers_that_a_browser_cannot_read_are_left_out(tmp_path):
    write_run(tmp_path, steps=1)
    path = tmp_path / "completions" / "completions_00001.jsonl"
    row = {"prompt": "?", "completion": "", "reward": math.nan, "advantage": math.inf}
    write_rows(path, [{**row, "stopped": True, "a": -math.inf, "b": [{}]}])
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 1, "reward": NaN, "loss": 1e999, "kl": true, "lr": 0.5}\n')
    found = written(tmp_path)
    (row,) = found["0/c1"]
    assert row["reward"] is row["advantage"] is None
    assert row["more"] == {"a": "-inf", "b": "[{}]"}
    curves = found["index"][0][0]["curves"]
    assert curves["reward"]["x"] == [1]
    assert curves["lr"] == {"x": [2], "y": [0.5]}
    assert not {"loss", "kl"} & {*curves}


def test_the_page_allows_no_script_but_its_own_and_makes_no_html_of_text(tmp_path):
    write_run(tmp_path, steps=1)
    assert commands.main(["view", str(tmp_path)]) == 0
    page, template = (tmp_path / "view.html").read_text(), TEMPLATE.read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    rules = "default-src 'none'; base-uri 'none'; img-src blob:; style-src 'sha256-"
    assert policy.startswith(rules)
    assert "unsafe" not in policy
    assert "connect" not in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", template)
    assert not re.search(r"https?:|//[a-z]+\.|\bimport\b|<link|@import|url\(", template)
    assert len(re.findall("<script(?! type=.text/plain)", page)) == 1


def test_a_page_that_cannot_be_made_is_a_user_error(tmp_path, capsys):
    write_run(tmp_path / "run", steps=1)
    write_run(tmp_path / "bad", steps=1)
    damaged = tmp_path / "bad/completions/completions_00001.jsonl"
    damaged.write_text("x\n" + damaged.read_text())
    run, other = str(tmp_path / "run"), str(tmp_path)
    log = f"{run}/metrics.jsonl"
    (tmp_path / "run/link").symlink_to(tmp_path / "secret")
    os.mkfifo(f"{run}/pipe")
    with Server([Run(tmp_path / "run")], 0) as busy:
        port = str(busy.server_port)
        for argv, sentence in [
            ([other], f"{other}/metrics.jsonl cannot be read (No such file or direc"),
            ([run, run, run], "3 runs are given: name one, or two to compare."),
            ([run, "--serve", "--port", port], f"--port {port} cannot be used"),
            ([run, "--out", f"{log}/view.html"], f"{log}/view.html could not be written"),
            *(
                ([run, "--out", path], f"{path} is not a page of `nanogrpo view`: choose")
                for path in (log, f"{run}/link", f"{run}/pipe", f"{run}/completions")
            ),
            ([str(tmp_path / "bad")], f"{damaged}:1 is not a record of a run"),
        ]:
            assert commands.main(["view", *argv]) == 2
            assert capsys.readouterr().err.startswith(f"error: {sentence}")


@pytest.mark.parametrize(
    "name", ["completions_00001.jsonl", "tokens_00002.jsonl.gz", f"pictures/{0:016x}.webp"]
)
def test_a_page_has_no_file_from_outside_of_the_run(tmp_path, capsys, name):
    """A run that someone else has made may have links there, also in place of its view.html."""
    write_run(tmp_path / "run", steps=2, pictures=PICTURES)
    page, file = tmp_path / "run/view.html", tmp_path / "run/completions" / name
    secret = file.rename(tmp_path / "secret")
    before = secret.read_bytes()
    file.symlink_to(secret)
    if "pictures" in name:  # the page says that it is missing
        assert commands.main(["view", str(tmp_path / "run")]) == 0
        assert f'id="0/p{0:016x}"' not in page.read_text()
        page.unlink()
    else:
        assert commands.main(["view", str(tmp_path / "run")]) == 2
        assert f"error: {file} is not a file of this run, because" in capsys.readouterr().err
        file.unlink()
    page.symlink_to(secret)
    assert commands.main(["view", str(tmp_path / "run")]) == 2
    assert f"{page} is not a page of `nanogrpo view`" in capsys.readouterr().err
    assert secret.read_bytes() == before


# --- the server ---


@pytest.fixture
def server(tmp_path):
    write_run(tmp_path, steps=2)
    with serving(tmp_path) as server:
        yield server


def ask(server: Server, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status == 200:
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in answer.headers
    return answer.status, body


def test_the_server_sends_what_the_page_has(server, tmp_path, capsys):
    secret = f"/{server.secret}"
    status, page = ask(server, f"{secret}/")
    assert status == 200
    assert b'id="live"' in page
    assert b"connect-src 'self'" in page
    found = written(tmp_path)
    index = json.loads(gzip.decompress(ask(server, f"{secret}/index")[1]))
    assert index == found["index"][0]
    for name in ("0/c1", "0/e0", "0/t2"):
        data = gzip.decompress(ask(server, f"{secret}/block/{name}")[1])
        assert [json.loads(line) for line in data.splitlines()] == found[name]
    write_run(tmp_path, steps=3)
    index = json.loads(gzip.decompress(ask(server, f"{secret}/index")[1]))
    assert index[0]["tokens"] == [1, 2, 3]
    assert server.secret not in capsys.readouterr().err


def test_the_server_answers_only_to_its_secret_address_on_this_machine(server):
    secret = f"/{server.secret}"
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/", "/index", "//", "/x/", f"{secret}x/", f"{secret[:-1]}/", "/favicon.ico"):
        assert ask(server, path)[0] == 404
    paths = "", "/x", "/block/0/c9", "/block/1/c1", "/block/0/c1/..", "/../../etc/passwd"
    paths += "/block/0/c%31", "/index?x", "/block/0/p1", "/block/0/p" + "0" * 16, "/block/0/p../x"
    for path in paths:
        assert ask(server, secret + path)[0] == 404
    write_run(server.runs[0].folder, steps=1, pictures=PICTURES)
    assert ask(server, f"{secret}/block/0/p{'0' * 16}") == (200, PICTURES[0])
    assert ask(server, f"{secret}/block/1/p{'0' * 16}")[0] == 404
    for method in ("POST", "PUT", "OPTIONS", "HEAD", "DELETE"):
        assert ask(server, f"{secret}/", method)[0] == 501
