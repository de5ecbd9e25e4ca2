"""The commands of a newcomer: `nanogrpo demo` and `nanogrpo doctor`.

Read next: nanogrpo/extras/arithmetic/demo.py, nanogrpo/extras/doctor.py.
"""

import json
import shutil
from importlib import metadata

from nanogrpo.cli import SUMS
from nanogrpo.extras import commands
from nanogrpo.extras.arithmetic import demo, warmup


def test_the_demo_trains_and_writes_a_page_with_everything(tmp_path, monkeypatch, capsys):
    """With a base model that is there already, and fewer steps."""
    shutil.copytree(f"{SUMS}/base", tmp_path / "base")
    mark = json.dumps({"seed": 0, "steps": 600}) + "\n"
    (tmp_path / "base" / warmup.MARK).write_text(mark)
    few = " --max-steps 2 --eval-steps 1 --save-steps 1 --eval-samples 4 --device cpu"
    few += " --generation-batch-size 16 --max-completion-length 8"
    monkeypatch.setattr(demo, "OPTIONS", demo.OPTIONS + few)
    for _ in range(2):  # a second demo replaces the first
        assert commands.main(["demo", str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("held-out accuracy_reward ") == 2
    page = (tmp_path / "view.html").read_text()
    assert [f'id="0/{block}"' in page for block in ("c1", "e2", "t2")] == [True] * 3


def test_a_command_without_options_prints_its_help(capsys):
    assert commands.main(["demo", "--help"]) == 0
    assert capsys.readouterr().out == f"{demo.__doc__}\n"


def test_the_doctor_names_the_command_for_each_missing_package(monkeypatch, capsys):
    needed = ["torch>=1", "numpy<1", 'none; extra == "wandb"', 'also-none; extra == "test"']
    monkeypatch.setattr(metadata, "requires", lambda _: needed)
    assert commands.main(["doctor"]) == 0
    torch, numpy, none = capsys.readouterr().out.splitlines()[1:]
    assert torch.split() == ["torch", metadata.version("torch"), "every", "run"]
    assert numpy.endswith("pip install 'nanogrpo'  # numpy<1")
    assert none.endswith("--report-to wandb" + 29 * " " + "pip install 'nanogrpo[wandb]'  # none")
