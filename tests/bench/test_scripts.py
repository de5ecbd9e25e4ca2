"""Every benchmark runs: a few tiny steps, from the command line to the records and their table.

The benchmarks compare their sides themselves, and raise if these do not compute the same. Speeds
are not tested. Read next: test_peers.py (that like is compared with like).
"""

import importlib
import json
import re
import shlex
import sys

import pytest
import torch

from bench import (
    common,
    compare,
    four_bits,
    learning,
    objectives,
    precision,
    real_model,
    rollout_speed,
    runs,
    step_sides,
    tables,
)
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.extras.commandline import parse
from nanogrpo.extras.options import CHOICES

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11"),
    # TRL uses deprecated parts of transformers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SMALL = {
    "num_generations": 4,
    "generation_batch_size": 16,
    "max_completion_length": 8,
    "eval_samples": 8,
}
LARGE_VOCABULARY = step_sides.Case(2, 8, 8, 32, vocab=16_384)
SHORT = objectives.Experiment(
    "Does it?", f"{objectives.TINY} --max-steps 1 --eval-samples 8", {"dapo": ""}, "Yes."
)
# module → (options, what is smaller than in the real benchmark, the sides of its records)
SCRIPTS = {
    "learning": (
        "--seeds 1 --steps 2 --eval-steps 2 --threads 1 --base BASE",
        {"SETTINGS": {**learning.SETTINGS, **SMALL}},
        ["nanogrpo", "TRL", common.REPLAYED],
    ),
    "real_model": (
        "--quick --threads 1 --seeds 1 --base BASE",
        {},
        ["nanogrpo", "TRL"],
    ),
    "end_to_end": (
        "--hidden 64 --layers 1 --vocab 128 --prompts 2 --group 2 --prompt-length 5 --length 6"
        " --rounds 1 --steps 2 --threads 1 --cases even",
        {},
        ["nanogrpo", "TRL"],
    ),
    "rollout_speed": (
        "--hidden 64 --layers 1 --vocab 128 --batch 8 --group 4 --prompt-length 5 --length 6"
        " --longest 12 --batches 2 --repeats 1 --threads 1 --vllm-python=",
        {},
        ["nanogrpo", "nanogrpo, unpacked", "transformers eager", "transformers sdpa", "vLLM"] * 2
        + ["nanogrpo", "nanogrpo, unpacked", "transformers generate_batch", "vLLM"],
    ),
    "plan": (
        "--cases 3M --steps 2 --prompts 2 --group 2 --prompt-length 4 --longest 6 --threads 1",
        {"SIZES": {"3M": (32, 1, 128)}},
        ["nanogrpo"],
    ),
    "four_bits": (
        "--seeds 1 --steps 1 --real-seeds 0 --threads 1 --base BASE",
        {"LORA": {**four_bits.LORA, **SMALL}},
        ["tiny, bfloat16", "tiny, 4 bits"],
    ),
    "attention_speed": (
        "--threads 1 --repeats 1 --scale 0.01",
        {"CASE": step_sides.Case(2, 3, 256, 1024)},
        ["torch", "triton", "two-call", "flash4"],
    ),
    "step_time": (
        "--threads 1 --repeats 1 --scale 0.2 --hidden 64 --layers 2 --cases uneven,",
        {"CASES": {"uneven,": step_sides.Case(4, 8, 32, 64)}},
        None,
    ),
    "step_memory": (
        "--threads 1 --hidden 32 --layers 1",
        {"CASES": {"large": LARGE_VOCABULARY}},
        None,
    ),
    "parity_trl": ("--seeds 1", {"pairs": lambda: [("dapo", "plain")]}, None),
    "objectives": (
        "--tiny-base BASE --workers 1 --seeds 1",
        {"EXPERIMENTS": {"tiny": SHORT}},
        None,
    ),
    "precision": (
        "--seeds 1 --steps 2 --base BASE",
        {
            "SIDES": {"float32": "", "float8 engine + weights": precision.TRUNCATED},
            "WIDES": ["wide model: float32"],
        },
        ["wide model: float32", "float32", "float8 engine + weights"],
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "base"
    warmup.make_base(folder, steps=2)
    return folder


@pytest.fixture
def small(base, tmp_path, monkeypatch, in_this_process):
    """Return a function that runs a script as SCRIPTS says, in this process."""
    given = json.loads(real_model.OPTIONS.read_text())
    given |= {f"{name}data": [f"{tmp_path}/problems/{split}.jsonl"] for name, split in SPLITS}
    (tmp_path / "options.json").write_text(json.dumps({**given, "reward_timeout": 0.0}))
    monkeypatch.setattr(real_model, "OPTIONS", tmp_path / "options.json")
    threads = torch.get_num_threads()

    def run(name: str) -> list[dict]:
        options, changes, _ = SCRIPTS[name]
        module = importlib.import_module(f"bench.{name}")
        for attribute, value in changes.items():
            monkeypatch.setattr(module, attribute, value)
        words = options.replace("BASE", str(base)).replace("OUT", str(tmp_path)).split()
        return module.main([*words, "--out", str(tmp_path)])

    yield run
    torch.set_num_threads(threads)


SPLITS = (("", "train"), ("eval_", "held_out"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_small_run_writes_its_records_and_their_table(name, small, tmp_path, monkeypatch):
    records, sides = small(name), SCRIPTS[name][2]
    assert records == common.read(name, tmp_path)
    assert sides is None or [record["side"] for record in records] == sides
    if name in tables.BENCHES:
        lines = tables.lines_of(name, records)
        assert {len(line) for line in lines} == {len(tables.BENCHES[name].columns)}
    pictures = [path.stat().st_size for path in tmp_path.glob("*.png")]
    assert name not in ("learning", "real_model", "step_time") or min(pictures) > 10_000
    if name in ("learning", "real_model", "objectives", "precision"):
        # a run with a record is not repeated
        monkeypatch.setattr(runs, "run", lambda *_: pytest.fail("a new run"))
        assert small(name) == records


def test_a_profile_counts_the_work_of_each_step(small, monkeypatch):
    options = "--profile --quick --threads 1 --base BASE", {}, None
    monkeypatch.setitem(SCRIPTS, "real_model", options)
    (record,) = small("real_model")
    assert 0 < record["train"]["share_of_peak"] < 1
    assert 0 < record["sample"]["share_of_peak"] < 1


def test_without_a_gpu_the_scripts_that_need_one_end_with_one_sentence(capsys):
    assert importlib.import_module("bench.kernel_speed").main(["--check"]) == 0
    if not torch.cuda.is_available():
        assert importlib.import_module("bench.kernel_speed").main([]) == 2
        with pytest.raises(SystemExit, match="2"):
            importlib.import_module("bench.step_time").main(["--shape", "0.6B"])
        assert "--shape 0.6B needs a GPU, and torch finds none." in capsys.readouterr().err


def test_the_requests_of_nano_vllm_are_its_own():
    """nano-vllm prints the number of its tokens."""
    prompts = rollout_speed.nano_vllm(256, 1024, 1024, vocab=151_936)
    assert sum(p.max_tokens for p in prompts) == 133_966


def test_two_checkouts_are_compared_case_by_case(capsys):
    tiny = "--hidden 32 --layers 1 --vocab 64 --batch 4 --group 4 --prompt-length 2 --length 2"
    tiny += " --longest 4 --batches 1 --repeats 1 --threads 1 --bench rollout_speed --pairs 1"
    tiny += " --cases even uneven"
    assert compare.main([str(common.ROOT), *tiny.split()]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"even: \d+\.\d % (fast|slow)er; uneven: \d+\.\d % (fast|slow)er$", last)
    assert compare.verdict([0.9, 1.1, 0.8]) == "no difference"


def test_every_row_about_objectives_is_valid_and_every_loss_type_has_one():
    used = set()
    for name, experiment in objectives.EXPERIMENTS.items():
        for case in experiment.cases:
            cfg = parse(shlex.split(f"{objectives.command(name, case)} --model base"))
            cfg.validate()
            used.add(cfg.loss_type)
    assert used == set(CHOICES["loss_type"]) - {"bnpo"}  # the same as dapo here


def test_the_page_about_objectives_is_made_from_the_records():
    page = (common.ROOT / "docs/objectives.md").read_text()
    assert page == objectives.page(common.read("objectives")), (
        "run python -m bench.objectives --redraw"
    )


def test_the_page_about_precision_shows_the_table_of_the_records():
    page = (common.ROOT / "docs/precision.md").read_text()
    assert page == precision.page(page, common.read("precision")), (
        "run python -m bench.precision --redraw"
    )
