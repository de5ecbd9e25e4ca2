"""`make gpu` without a GPU: its stages, their limits, and the tables for a pull request.

Read next: bench/gpu.py.
"""

import json
import os
import signal
import subprocess

import pytest
import torch

from bench import common, gpu, tables
from tests.ranks import alive, until


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_make_and_the_benchmark_end_with_one_sentence(tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "bench.gpu needs an NVIDIA GPU, and torch finds none.\n"
    assert not (tmp_path / "out").exists()
    done = subprocess.run(
        ["make", "--silent", "gpu"],
        cwd=common.ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    sentence, *rest = done.stderr.splitlines()
    assert sentence == "make gpu needs an NVIDIA GPU, and nvidia-smi finds none."
    assert all(line.startswith("make: ***") for line in rest)


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--stages", "kernel"])
    assert "'kernel'" in capsys.readouterr().err


def test_each_stage_can_run_alone_and_a_failed_one_stops_no_other(tmp_path, monkeypatch, capsys):
    steps = [{"step_time": 9.0}, *({"step_time": t, "tokens_per_second": 1 / t} for t in (1, 2, 3))]
    (tmp_path / "gpu_train").mkdir()
    log = tmp_path / "gpu_train" / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in [{"config": {}}, *steps]))
    stages = {
        "tests": [["-c", "import sys; print('bad'); sys.exit(3)"], ["-c", "print('not reached')"]],
        "train": [["-c", "import pathlib; pathlib.Path('OUT', 'seen').touch()"]],
    }
    monkeypatch.setattr(gpu, "STAGES", stages)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    out = ["--out", str(tmp_path)]
    assert gpu.main(["--stages", "tests", "train", *out]) == 1
    assert (tmp_path / "gpu_tests.log").read_text() == "bad\n"
    assert (tmp_path / "seen").exists()
    failed, trained = common.read("gpu", tmp_path)
    assert failed["status"] == "failed with exit status 3"
    assert (trained["status"], trained["step_time"]) == ("passed", 2)
    stages["tests"] = [["-c", ""]]
    assert gpu.main(["--stages", "tests", *out]) == 0  # repeated alone
    assert [r["status"] for r in common.read("gpu", tmp_path)] == ["passed", "passed"]
    page = (tmp_path / "gpu.md").read_text()
    assert "| train | passed |" in page
    assert f"| decode | {tables.MISSING} |" in page


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_stage_that_takes_too_long_or_is_interrupted_ends_with_its_processes(
    interrupted, tmp_path, monkeypatch
):
    child = (
        "import subprocess as s; p = s.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    )
    monkeypatch.setattr(gpu, "STAGES", {"tests": [["-c", child]]})
    if interrupted:  # as by Ctrl-C, which reaches only this process
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            gpu.run("tests", tmp_path)
        signal.signal(signal.SIGALRM, before)
    else:
        found = gpu.run("tests", tmp_path, limit=1.0)
        assert found["status"] == "ended after 1 s"
    pid = int((tmp_path / "gpu_tests.log").read_text())
    until(lambda: not alive(pid))  # a killed process may take a moment to end


def test_the_stages_are_those_of_the_table_and_each_takes_at_most_ten_minutes():
    assert tuple(gpu.STAGES) == tables.GPU_STAGES
    assert gpu.LIMIT <= 600
    assert set(gpu.TABLES) <= set(tables.BENCHES)
