"""Who is left behind when a trainer is killed or a runner is dropped: no reward process.

Read before: test_reward_process.py.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanogrpo.rewards.runner import Runner

FUNCTIONS = Path(__file__).with_name("functions.py")


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, or before it was read
        return True


def worked(pid: int) -> int:
    """Processor time of a process that lives, in hundredths of a second."""
    assert not gone(pid)
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="elsewhere a process in an endless call outlives a killed trainer",
)
@pytest.mark.parametrize("name", ["backtracks", "calls"])
def test_the_process_dies_with_a_killed_trainer(name):
    program = f"""
from nanogrpo.rewards.process import RewardProcess
process = RewardProcess(["{FUNCTIONS}:{name}"])
print(process.process.pid, flush=True)
while True:
    process.call([(0, "f")], {{"prompts": ["3"]}}, ["sample 0 of prompt 3"], limit=60.0)
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(trainer.stdout.readline())
    before = worked(pid)
    until(lambda: worked(pid) > before + 10)  # it is in calls, or in the endless one
    trainer.kill()
    trainer.communicate()
    until(lambda: gone(pid))


def test_a_runner_that_is_dropped_takes_its_process_along():
    runner = Runner([f"{FUNCTIONS}:calls"], timeout=60)
    pid = runner.process.process.pid
    del runner
    until(lambda: gone(pid))


def test_the_process_is_a_light_one():
    """No torch, and so nothing of CUDA: it starts in a tenth of a second, also after a kill."""
    program = "import sys, nanogrpo.rewards.process as p; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
