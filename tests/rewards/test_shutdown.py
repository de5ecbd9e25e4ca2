"""When a trainer is killed or a runner is deleted, its reward process ends.

Read before: test_process.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import alive, until
from tests.rewards.conftest import FUNCTIONS, runner


def processor_time(pid: int) -> int:
    """Return the processor time of a living process in hundredths of a second."""
    assert alive(pid)
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="on other systems a process in an endless call outlives a killed trainer",
)
@pytest.mark.parametrize("name", ["backtracks", "calls"])
def test_the_process_dies_with_a_killed_trainer(name):
    program = f"""
from nanogrpo.rewards.process import RewardProcess
process = RewardProcess(["{FUNCTIONS}:{name}"], timeout=60.0)
print(process.process.pid, flush=True)
while True:
    process.call("{FUNCTIONS}:{name}", {{"prompts": ["3"], "completions": [""]}}, {{}})
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(trainer.stdout.readline())
    before = processor_time(pid)
    until(lambda: processor_time(pid) > before + 3)  # it works on calls, or on an endless one
    trainer.kill()
    trainer.communicate()
    until(lambda: not alive(pid))


def test_deleting_a_runner_ends_its_process():
    own = runner(f"{FUNCTIONS}:calls", timeout=60)
    pid = own.process.process.pid
    del own
    until(lambda: not alive(pid))


def test_the_process_does_not_import_torch():
    """It starts in a tenth of a second, also after a kill, and cannot touch CUDA."""
    program = (
        "import sys, nanogrpo.rewards.process as p; "
        "assert not {'torch', 'numpy'} & {*sys.modules}, sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
