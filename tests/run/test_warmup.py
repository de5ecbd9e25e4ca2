"""The built-in task and its base model: held-out problems stay held out, sums are right, and files
of others are not overwritten.

Read next: test_train.py (GRPO on a base).
"""

import hashlib
import json
import random
import re

import pytest

from nanogrpo.extras import commands
from nanogrpo.extras.arithmetic import task as tasks
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.rewards import builtin as rewards

# ---- the task ------------------------------------------------------------------------------------


def questions(split: str) -> list[str]:
    return [row["prompt"][0]["content"] for row in tasks.records(split)]


def totals(text: str) -> list[int]:
    """The running totals of a sum, the last of them its value, by Python's own arithmetic."""
    parts = re.findall(r"[+-]?\d+", text)
    assert "".join(parts) == text
    return [eval("".join(parts[: i + 1]), {"__builtins__": {}}) for i in range(len(parts))]


def test_held_out_problems_are_in_no_training_row_and_no_warm_up_text():
    train, held_out = questions("train"), questions("eval")
    assert (len(set(train)), len(set(held_out))) == (8192, 256)  # and none twice
    assert not set(train) & set(held_out)
    for seed in range(40):
        assert not any(tasks.held_out(text) for text in tasks.problems("train", 64, seed))
        assert all(tasks.held_out(text) for text in tasks.problems("eval", 8, seed))
    rng = random.Random("warm-up,0")  # what make_base draws from, seed 0
    texts = {
        f"{text}=" for _ in range(40) for text in tasks.problems("train", 64, rng.getrandbits(32))
    }
    assert len(texts) > 1000
    assert not texts & set(held_out)


def test_rows_are_the_same_at_every_call_and_on_every_machine():
    # Written down: with another stream, the runs of today and tomorrow could not be compared.
    for split, digest in (("train", "1a1aa4ac50c71b02"), ("eval", "aa01c116367c052a")):
        for _ in range(2):
            text = json.dumps(tasks.records(split))
            assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_solutions_are_right_and_the_rewards_agree():
    rng = random.Random(0)
    texts = tasks.problems("train", 400, seed=7)
    worked = [warmup.solution(text, rng, lazy=False) for text in texts]
    assert (
        warmup.solution("34+5-7", rng, lazy=False)
        == "<think>34+5=39,39-7=32</think><answer>32</answer>"
    )
    for text, solution in zip(texts, worked):
        steps = re.fullmatch(r"<think>(.*)</think><answer>(\d+)</answer>", solution)
        left, right = zip(*(step.split("=") for step in steps[1].split(",")))
        assert (
            [totals(term)[-1] for term in left]
            == [int(value) for value in right]
            == totals(text)[1:]
        )
    lazy = [warmup.solution(text, rng, lazy=True) for text in texts]
    for completions in (worked, lazy):
        assert rewards.format_reward(completions) == [1.0] * 400
        assert (
            rewards.accuracy_reward(completions, answer=[str(tasks.value(text)) for text in texts])
            == [1.0] * 400
        )
    for short, share in ((True, 0.8), (False, 0.2)):
        thought = [
            "<think></think>" not in s
            for text, s in zip(texts, lazy)
            if (len(totals(text)) == 2) == short
        ]
        # four standard deviations of about 100
        assert abs(sum(thought) / len(thought) - share) < 0.16


# ---- the base ------------------------------------------------------------------------------------


def test_the_base_is_the_same_every_time_and_loads_in_transformers(tmp_path):
    """After two steps, a complete base has learned nothing."""
    base, again = tmp_path / "base", tmp_path / "again"
    for folder in (base, again):
        assert commands.main(["warmup", str(folder), "--steps", "2"]) == 0
    for path in base.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    assert model.config.model_type == "qwen3"
    ours = warmup.Tokenizer(base)
    messages = [{"role": "user", "content": "34+5-7="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == ours.encode_prompt(messages)
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == ours.stop_token_ids[0]
    completion = warmup.solution("34+5-7", random.Random(0), lazy=False)
    assert ours.decode(ours.encode(completion)) == completion


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("models", ["config.json", "model.safetensors"]),  # another model
        ("link", ["config.json", warmup.MARK, "first", "model.safetensors"]),  # a run inside
    ],
)
def test_other_files_are_never_overwritten(tmp_path, capsys, given, names):
    folder = tmp_path / "models"
    for name in names:
        (folder / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    assert commands.main(["warmup", str(tmp_path / given)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"error: {folder}.* holds other files.*: choose another folder\.", line)
    assert {path.name for path in folder.iterdir()} == {*names}


def test_a_file_in_the_way_is_reported_in_one_sentence(tmp_path, capsys):
    (tmp_path / "base").write_text("mine")
    for folder in (tmp_path / "base", tmp_path / "base" / "deeper"):
        assert commands.main(["warmup", str(folder)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [line for line in lines if "warm-up" not in line or "error" in line] == lines[-1:]
        assert lines[-1].startswith("error: ")
        assert "choose another folder" in lines[-1]
    assert (tmp_path / "base").read_text() == "mine"
