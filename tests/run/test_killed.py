"""A run in a plain process is killed by SIGKILL at a random time; resumed, it repeats the same
bits.

Kills at chosen points, under torchrun, are in test_state.py. Read next: test_resume.py.
"""

import random
import re
import signal
import subprocess
import sys
import time

import train
from tests.conftest import arguments, steps


def test_a_run_killed_at_a_random_time_and_resumed_repeats_the_same_bits(
    tiny_base, files, tmp_path
):
    once, killed = tmp_path / "once", tmp_path / "killed"
    options = ["--save-steps", "2", "--num-iterations", "2", "--beta", "0.05", "--max-steps"]
    seed = random.SystemRandom().randrange(2**32)
    rng, resumed = random.Random(seed), arguments(tiny_base, files, killed, "--resume", *options)
    # too many steps to end by itself, however late the kill is on a busy machine
    command = [sys.executable, train.__file__, *resumed, "100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        finished = (line for line in process.stderr if re.match(r" *\d+/100,?000 ", line))
        for _ in range(rng.randint(1, 6)):
            next(finished)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
    assert process.returncode == -signal.SIGKILL, f"{seed=}"
    count = 4 + (killed / "metrics.jsonl").read_bytes().count(b"\n")
    assert train.main([*resumed, str(count)]) == 0
    assert train.main(arguments(tiny_base, files, once, *options, str(count))) == 0
    assert [row["step"] for row in steps(killed)] == list(range(count)), f"{seed=}"
    assert steps(killed) == steps(once), f"{seed=}"
    last = [folder / f"checkpoint-{count}" / "model.safetensors" for folder in (once, killed)]
    assert last[0].read_bytes() == last[1].read_bytes(), f"{seed=}"
    assert [p.name for p in killed.glob(".*")] == [".lock"], f"{seed=}"
