"""Full runs of train.py with a real vLLM: they learn as with the local engine, and they survive
failures of either side.

One session-wide server serves all runs but one, which starts its own. Marked `vllm`: see real.py.
"""

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from nanogrpo.model.checkpoint import load_model
from nanogrpo.vllm.auth import SECRET
from tests.conftest import arguments, steps, write_rows
from tests.engine.chat import write_calling_base
from tests.ranks import alive, run, until
from tests.vllm.real import CPU, PYTHON, ROOT, problem, processes

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OWN = ["--engine", "vllm", "--server-timeout", "20"]
os.environ["NANOGRPO_VLLM_PYTHON"] = PYTHON
OWN.append("--vllm-options=" + " ".join(CPU[2:]))


@pytest.fixture
def base(tied) -> Path:
    return tied.folder


@pytest.fixture(scope="module")
def files(files, tmp_path_factory) -> Path:
    """The same folder of files, but with prompts of a real size."""
    folder = shutil.copytree(files, tmp_path_factory.mktemp("real") / "files")
    write_rows(folder / "data.jsonl", ({"prompt": problem(i)} for i in range(12)))
    return folder


@pytest.fixture
def server(tied, monkeypatch) -> list[str]:
    """The options that name a running server. Its secret is in the environment."""
    monkeypatch.setenv(SECRET, tied.process.secret)
    return ["--engine", "vllm", "--server", tied.server.url]


def start(argv: list[str]) -> subprocess.Popen:
    """Start a run in a process of its own."""
    command = [sys.executable, str(ROOT / "train.py"), *argv]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(argv: list[str], ranks: int = 1) -> None:
    """Run to the end: in this process, or on several ranks."""
    if ranks == 1:
        assert train.main(argv) == 0
    else:
        secret = os.environ.get(SECRET, "")
        assert run(ranks, train.main, argv, **{SECRET: secret}) == [0] * ranks


def wait_for_step(run: subprocess.Popen, output: Path, step: int, within: float = 180.0) -> None:
    deadline = time.monotonic() + within
    while not (output / "metrics.jsonl").exists() or len(steps(output)) <= step:
        assert run.poll() is None, run.stdout.read()[-3000:]
        assert time.monotonic() < deadline, f"step {step} was not reached within {within} s"
        time.sleep(0.05)


def trained_on(output: Path) -> list[dict]:
    """Return the log without fields that depend on the server's batches (the last digits of its
    log-probs) and on failures.
    """
    return [
        {k: v for k, v in row.items() if not k.startswith(("sampling/", "vllm/"))}
        for row in steps(output)
    ]


def test_the_reward_rises_as_with_the_embedded_engine(base, files, tmp_path, server):
    """Synchronous, one step ahead, and on two ranks. Engines have different random numbers, so the
    curves are similar, not equal.
    """
    options = "--max-steps 24 --num-generations 8 --generation-batch-size 64 --learning-rate 3e-3"
    options = options.split()
    late = {}
    for name, more in {
        "local": [],
        "vllm": server,
        "ahead": [*server, "--max-staleness", "1"],
    }.items():
        finish(arguments(base, files, tmp_path / name, *options, *more))
        rewards = [row["reward"] for row in steps(tmp_path / name)]
        late[name] = statistics.fmean(rewards[-4:])
        assert late[name] > statistics.fmean(rewards[:2]) + 0.25, (name, rewards)
    finish(arguments(base, files, tmp_path / "two", *options, *server), ranks=2)
    assert late["vllm"] == pytest.approx(late["local"], abs=0.1)
    assert late["ahead"] == pytest.approx(late["local"], abs=0.15)
    one, two = steps(tmp_path / "vllm"), steps(tmp_path / "two")
    # the same seeds, the same samples
    assert [r["reward"] for r in two] == pytest.approx([r["reward"] for r in one], abs=1e-6)
    for name in ("vllm", "two"):
        assert all(
            row["sampling/sampling_logp_difference/max"] <= 1e-5 for row in steps(tmp_path / name)
        ), name
    ahead = steps(tmp_path / "ahead")
    assert {row["staleness/max"] for row in ahead} <= {0, 1}
    assert any(row["staleness/max"] == 1 for row in ahead)
    # the gap of one step is real
    assert max(row["sampling/sampling_logp_difference/max"] for row in ahead) > 1e-5


def test_own_server_killed_and_own_trainer_killed_lose_nothing(base, files, tmp_path, server):
    """One command starts the server too. The test kills the server during the run, and then the
    trainer. After a resume, the log equals that of an undisturbed run.
    """
    options = ["--max-steps", "12", "--save-steps", "1"]
    finish(arguments(base, files, tmp_path / "quiet", *options, *server))
    output = tmp_path / "disturbed"
    training = start(arguments(base, files, output, *options, *OWN))
    wait_for_step(training, output, 1)
    (sidecar_pid,) = [
        p
        for p in processes(training.pid)[1:]
        if "serve.py" in Path(f"/proc/{p}/cmdline").read_text()
    ]
    os.kill(sidecar_pid, signal.SIGKILL)
    until(lambda: steps(output)[-1]["vllm/restarts"] == 1, 180.0)
    assert training.poll() is None
    family = processes(training.pid)
    training.kill()
    # the server that it started ended with it
    until(lambda: not any(map(alive, family)), seconds=30.0)
    training.communicate()
    finish(arguments(base, files, output, *options, *server, "--resume"))
    assert trained_on(output) == trained_on(tmp_path / "quiet")


@pytest.mark.parametrize("bits", [[], ["--load-in-4bit"]])
def test_adapters_are_sampled_merged(base, files, tmp_path, server, bits):
    """After every step, the log-probs of the server are those of base and adapters together. A base
    in 4 bits is sent dequantized, in place of the floats that the server has started with.
    """
    adapters = "--lora-r 8 --lora-alpha 16 --learning-rate 2e-2 --max-steps 6"
    options = [*bits, *adapters.split(), "--generation-batch-size", "32"]
    for name, ranks in {"one": 1, "two": 2}.items():
        finish(arguments(base, files, tmp_path / name, *options, *server), ranks=ranks)
        assert all(
            row["sampling/sampling_logp_difference/max"] <= 1e-5 for row in steps(tmp_path / name)
        ), name
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert [r["reward"] for r in one] == pytest.approx([r["reward"] for r in two], abs=1e-6)
    before, merged = (
        dict(load_model(f).named_parameters()) for f in (base, tmp_path / "one" / "checkpoint-6")
    )
    moved = {name for name, w in merged.items() if (w - before[name]).abs().max() > 1e-2}
    # every adapted matrix of two layers: a base sent alone would not give these log-probs
    assert len(moved) == 7 * 2


def test_tool_calls_with_answers_in_between(base, files, tmp_path, server):
    """Two ranks sample and train the same as one, although their completions have different
    numbers of calls.
    """
    options = [*write_calling_base(base, tmp_path / "base"), *server]
    options += ["--max-completion-length", "64"]
    for folder, ranks in {"one": 1, "two": 2}.items():
        finish(arguments(base, files, tmp_path / folder, *options), ranks=ranks)
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert all(row["sampling/sampling_logp_difference/max"] <= 1e-5 for row in one + two)
    assert all(row["tools/call_frequency"] > 0 for row in one)
    assert 0 < sum(row["tools/failure_frequency"] for row in one) < 3
    for name in ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length"):
        assert [r[name] for r in one] == [r[name] for r in two]
    assert [r["reward"] for r in one] == pytest.approx([r["reward"] for r in two], abs=1e-6)


def test_a_server_that_hangs_for_good_stops_the_run_with_its_checkpoint(
    base, files, tmp_path, server, tied
):
    """The last test with this server. The run notices within the timeout, and a signal ends its
    wait for the server.
    """
    options = [*server, "--max-steps", "1000", "--server-timeout", "10"]
    training = start(arguments(base, files, tmp_path, *options))
    wait_for_step(training, tmp_path, 1)
    os.killpg(tied.process.process.pid, signal.SIGSTOP)
    training.terminate()
    output, _ = training.communicate(timeout=120)
    assert training.returncode == 2, output[-3000:]
    assert "continue with --resume" in output.strip().splitlines()[-1]
    assert (tmp_path / f"checkpoint-{len(steps(tmp_path))}").exists()
    tied.process.kill()
