"""What `nanogrpo view` reads and writes, and what its server answers; without a browser.

Read before: test_completions.py. Read next: test_view_page.py.
"""

import base64
import gzip
import http.client
import itertools
import json
import os
import random
import re
import shutil
import threading
import time

import pytest

from nanogrpo.logs import plot
from nanogrpo.logs.view import TEMPLATE, Server, main
from nanogrpo.logs.view_data import Run
from tests.logs.conftest import write_run
from tests.test_mutations import mutations


def blocks(page: str) -> dict[str, list]:
    """Return the lines of each block in a page; of the index, its only line."""
    found = re.findall(r'<script type="text/plain" id="([^"]+)">([\w+/=]*)</script>', page)
    unpacked = ((name, gzip.decompress(base64.b64decode(data)).decode()) for name, data in found)
    return {name: [json.loads(line) for line in text.splitlines()] for name, text in unpacked}


def written(folder, *options: str) -> dict[str, list]:
    assert main([str(folder), *options]) == 0
    return blocks((folder / "view.html").read_text())


def test_a_page_has_the_curves_and_every_completion_and_token(tmp_path):
    write_run(tmp_path, steps=3)
    found = written(tmp_path)
    (run,) = found["index"][0]
    rows = plot.read(tmp_path)
    for name in ("reward", "entropy", "eval/reward"):
        x, y = plot.series(rows, name)
        assert run["curves"][name] == {"x": x, "y": y}
    assert run["blocks"] == {
        "c": [[step, [[0, 2, 1.0], [1, 2, 1.0]]] for step in (1, 2, 3)],
        "e": [[0, [[0, 1, 1.0]]]],
    }
    assert run["prompts"] == ["first?", "second?"]
    assert (run["tokens"], run["notes"]) == ([1, 2, 3], [])
    assert {*found} == {"index", "0/c1", "0/c2", "0/c3", "0/e0", "0/t1", "0/t2", "0/t3"}
    for step in (1, 2, 3):
        path = tmp_path / "completions" / f"completions_{step:05d}.jsonl"
        for row, line in zip(found[f"0/c{step}"], path.read_text().splitlines(), strict=True):
            logged = json.loads(line)
            assert row["completion"] == logged["completion"]
            assert row["advantage"] == logged["advantage"]
            assert row["more"] == {"ok": "ok"}
        tokens = gzip.decompress(path.with_name(f"tokens_{step:05d}.jsonl.gz").read_bytes())
        assert found[f"0/t{step}"] == [json.loads(line) for line in tokens.splitlines()]


PICTURES = [b"RIFF....WEBP first", b"RIFF....WEBP second"]


def test_prompts_that_differ_only_in_their_pictures_are_apart(tmp_path):
    write_run(tmp_path, steps=1, prompt="second?", pictures=PICTURES)
    path = tmp_path / "completions/completions_00001.jsonl"
    text = path.read_text().replace('[{"role": "user", "content": "second?"}]', '"second?"')
    path.write_text(text)
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / "view.html").read_text()
    found = dict(re.findall(r'<script type="text/plain" id="([^"]+)">([\w+/=]*)</script>', page))
    (run,) = json.loads(gzip.decompress(base64.b64decode(found["index"])))
    assert run["prompts"] == ["second?", "second?"]
    assert run["blocks"]["c"] == [[1, [[0, 2, 1.0], [1, 2, 1.0]]]]
    names = [f"0/p{i:016x}" for i in (0, 1)]
    assert [base64.b64decode(found[name]) for name in names] == PICTURES
    assert "img-src blob:" in page


def test_only_pictures_that_are_shown_and_fit_are_in_the_page(tmp_path, capsys):
    large = [PICTURES[0] + bytes(300_000), PICTURES[1] + bytes(300_000)]
    write_run(tmp_path, steps=4, pictures=large)
    (tmp_path / f"completions/pictures/{7:016x}.webp").write_bytes(large[0] * 50)  # not shown
    for mib, count in (("1", 2), ("0.5", 1), ("0.2", 0)):
        assert main([str(tmp_path), "--mib", mib]) == 0
        page = (tmp_path / "view.html").read_text()
        assert len(re.findall('id="0/p', page)) == count
        assert len(page) < float(mib) * 2**20 + 60_000  # the page itself
        note = f"To stay near {mib} MiB, the page leaves out {2 - count} pictures: "
        assert (note in capsys.readouterr().err) == (count < 2)
        assert len(re.findall('id="0/c', page)) == 4


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "text"])
def test_what_is_no_picture_is_not_read(kind, tmp_path):
    write_run(tmp_path, steps=1, pictures=PICTURES)
    path = tmp_path / f"completions/pictures/{0:016x}.webp"
    path.unlink()
    (tmp_path / "secret").write_text("secret")
    if kind in ("link", "dangling"):
        path.symlink_to(tmp_path / ("secret" if kind == "link" else "nothing"))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("secret")
    assert main([str(tmp_path)]) == 0
    assert re.findall('id="(0/p[^"]*)', (tmp_path / "view.html").read_text()) == [f"0/p{1:016x}"]


def test_a_column_of_an_older_run_may_be_named_images(tmp_path):
    write_run(tmp_path, steps=1, more="images")
    rows = written(tmp_path)["0/c1"]
    assert rows[0]["more"] == {"images": "images"}
    assert rows[0]["images"] == []


def test_names_of_pictures_that_are_no_names_are_left_out(tmp_path):
    write_run(tmp_path, steps=1, pictures=PICTURES)
    path = tmp_path / "completions/completions_00001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    good = "pictures/0000000000000001.webp"
    foreign = [good, 3, None, "../../secret"], "pictures/x.webp", {"a": 1}, [[good, "/etc/passwd"]]
    for row, images in zip(rows, foreign):
        row["images"] = images
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree(tmp_path / "completions/pictures")  # the files are missing, too
    block = written(tmp_path)["0/c1"]
    assert [row["images"] for row in block] == [["0000000000000001"], [], [], ["0000000000000001"]]


def test_a_long_run_has_steps_at_equal_distances_and_the_last_one(tmp_path, capsys):
    write_run(tmp_path, steps=20)
    size = sum(p.stat().st_size for p in (tmp_path / "completions").iterdir())
    found = written(tmp_path, "--mib", str(size / 2**20 / 4))
    kept = [step for step, _ in found["index"][0][0]["blocks"]["c"]]
    assert 20 in kept
    assert 4 <= len(kept) <= 12
    assert len({b - a for a, b in itertools.pairwise(kept)}) == 1
    assert {f"0/c{step}" for step in kept} <= {*found}
    (note,) = found["index"][0][0]["notes"]
    assert note in capsys.readouterr().err
    assert f"the completions of {len(kept)} of its 21 steps" in note


def test_a_damaged_file_still_gives_a_page(tmp_path):
    write_run(tmp_path, steps=1)
    names = "metrics.jsonl", "completions/completions_00001.jsonl"
    for path in (tmp_path / name for name in names):
        good, rng = path.read_bytes(), random.Random(path.name)
        for bad, _ in zip(mutations(good, rng), range(60)):
            path.write_bytes(bad)
            begun = time.process_time()
            found = written(tmp_path)
            assert len(found) == 4
            assert time.process_time() - begun < 5
        path.write_bytes(good)
    (tmp_path / "completions" / "completions_00002.jsonl").mkdir()
    (tmp_path / "completions" / "eval_12.jsonl").write_text("of another program")
    assert len(written(tmp_path)) == 4


def test_numbers_that_a_browser_cannot_read_are_left_out(tmp_path):
    write_run(tmp_path, steps=1)
    path = tmp_path / "completions" / "completions_00001.jsonl"
    path.write_text('{"prompt": 7, "reward": NaN, "advantage": 1e999, "a": -Infinity, "b": [{}]}\n')
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 1, "reward": NaN, "loss": 1e999, "kl": true, "lr": 0.5}\n')
    found = written(tmp_path)
    (row,) = found["0/c1"]
    assert (row["prompt"], row["completion"]) == ("7", "")
    assert row["reward"] is row["advantage"] is None
    assert row["more"] == {"a": None, "b": "[{}]"}
    curves = found["index"][0][0]["curves"]
    assert curves["reward"]["x"] == [1]
    assert curves["lr"] == {"x": [2], "y": [0.5]}
    assert not {"loss", "kl"} & {*curves}


def test_the_page_allows_no_script_but_its_own_and_makes_no_html_of_text(tmp_path):
    write_run(tmp_path, steps=1)
    assert main([str(tmp_path)]) == 0
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
    run, other = str(tmp_path / "run"), str(tmp_path)
    with Server([Run(tmp_path / "run")], 0) as busy:
        port = str(busy.server_port)
        for argv, sentence in [
            ([other], f"{other} has no metrics.jsonl: give the output folder of a run."),
            ([run, run, run], "3 runs are given: name one, or two to compare."),
            ([run, "--mib", "0"], "--mib is 0: give a number above 0."),
            ([run, "--mib", "nan"], "--mib is nan: give a number above 0."),
            ([run, "--port", "80"], "--port 80 has no effect without --serve: add it."),
            (
                [run, "--serve", "--port", "70000"],
                "--port is 70000: give a number from 0 to 65535.",
            ),
            (
                [run, "--serve", "--out", "x"],
                "--out has no effect with --serve, which writes no file: leave it out.",
            ),
            (
                [run, "--serve", "--port", port],
                f"--port {port} cannot be used (Address already in use): choose another one, or"
                " leave it out.",
            ),
            (
                [run, "--out", f"{run}/no/view.html"],
                f"{run}/no/view.html could not be written (No such file or directory): make room.",
            ),
        ]:
            assert main(argv) == 2
            assert capsys.readouterr().err == f"error: {sentence}\n"


# --- the server ---


@pytest.fixture
def server(tmp_path):
    write_run(tmp_path, steps=2)
    with Server([Run(tmp_path)], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers=headers)
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
    secret, port = f"/{server.secret}", server.server_port
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/", "/index", "//", "/x/", f"{secret}x/", f"{secret[:-1]}/", "/favicon.ico"):
        assert ask(server, path)[0] == 404
    for path in ("", "/x", "/block/0/c9", "/block/1/c1", "/block/0/c1/..", "/../../etc/passwd"):
        assert ask(server, secret + path)[0] == 404
    for path in ("/block/0/c%31", "/index?x", "/block/0/x1", "/block/0/c" + "1" * 99):
        assert ask(server, secret + path)[0] == 404
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert ask(server, f"{secret}/", Host=host)[0] == 403
    assert ask(server, f"{secret}/", Host=f"localhost:{port}")[0] == 200
    for path in ("/block/0/p1", "/block/0/p" + "0" * 16, "/block/0/c" + "a" * 8, "/block/0/p../x"):
        assert ask(server, secret + path)[0] == 404
    write_run(server.runs[0].folder, steps=1, pictures=PICTURES)
    assert ask(server, f"{secret}/block/0/p{'0' * 16}") == (200, PICTURES[0])
    assert ask(server, f"{secret}/block/1/p{'0' * 16}")[0] == 404
    for method in ("POST", "PUT", "OPTIONS", "HEAD", "DELETE"):
        assert ask(server, f"{secret}/", method)[0] == 501
