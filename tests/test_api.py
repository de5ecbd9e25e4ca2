"""Training from Python: functions and data as objects, records as the result, and mistakes.

Read next: nanogrpo/extras/api.py.
"""

import asyncio
import contextlib
import datetime
import os
import re
import threading

import numpy as np
import pytest
import torch

import nanogrpo
from nanogrpo import Config, train
from nanogrpo.data import sources
from tests.conftest import lines, refused

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(3)]
GIVEN: dict = {"reward_funcs": "format", "train_dataset": SUMS}


def config(base, output, **options) -> Config:
    small = {"num_generations": 4, "generation_batch_size": 16, "max_completion_length": 8}
    options = {"max_steps": 2, "device": "cpu", **small, **options}
    return Config(model=str(base), output_dir=str(output), **options)


def test_functions_and_records_train_as_files_do(tiny_base, tmp_path):
    seen = []

    def even(completion_ids, answer, **kwargs):  # a closure: no file could name it
        seen.extend(answer)
        return [float(len(ids) % 2 == 0) for ids in completion_ids]

    calls = []
    rows = train(
        config(tiny_base, tmp_path, eval_steps=2),
        reward_funcs=[even, "format"],
        train_dataset=SUMS,
        eval_dataset=SUMS[:3],
        on_step=calls.append,
    )
    before, *steps, after = lines(tmp_path)[1:]
    assert [*rows] == steps
    assert rows.evals == [before, after]
    assert rows.steps == [1, 2]
    first = ["step", "reward", "rewards/even/mean", "rewards/format_reward/mean"]
    assert [*rows[0]][:4] == first
    assert calls == [before | row for row in steps]
    assert seen
    assert {*seen} <= {row["answer"] for row in SUMS}
    header = lines(tmp_path)[0]["run"]
    assert header["reward_funcs"] == ["even from Python", "format"]
    assert rows.checkpoint == tmp_path / "checkpoint-2"
    values = {0: before["eval/reward"], 2: after["eval/reward"]}
    step = max(values, key=values.get)
    assert rows.best == (rows.checkpoint if step else None, values[step], step)
    assert repr(rows).startswith(
        f"Result({os.path.relpath(tmp_path)!r}): held-out reward {values[0]:.3f} → "
    )
    assert len(rows.plot("reward", "entropy").axes) == 2
    assert rows.plot("reward")._repr_png_().startswith(b"\x89PNG")

    metrics, completions = nanogrpo.evaluate(
        rows, SUMS[:3], reward_funcs=[even, "format"], device="cpu"
    )
    assert metrics == {n: x for n, x in after.items() if n not in ("step", "eval/after")}
    assert nanogrpo.generate(rows, [row["prompt"] for row in SUMS[:2]], device="cpu") == [
        nanogrpo.generate(str(rows.checkpoint), row["prompt"], max_completion_length=8)
        for row in SUMS[:2]
    ]
    assert [row["prompt"] for row in completions] == [row["prompt"] for row in SUMS[:3]]
    assert len({*nanogrpo.generate(rows, ["1+1="] * 3, temperature=1.0)}) == 3


def test_a_function_with_the_name_of_a_built_in_one_is_the_users(tiny_base, tmp_path):
    def accuracy_reward(completions, gt, **kwargs):
        return [0.25 for _ in completions]

    data = [{"prompt": f"{i}+1=", "gt": i + 1} for i in range(4)]
    cfg = config(tiny_base, tmp_path, max_steps=1)
    (row,) = train(cfg, reward_funcs=accuracy_reward, train_dataset=data)
    assert row["rewards/accuracy_reward/mean"] == 0.25


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, None])
def test_the_weights_move_although_a_caller_or_a_function_turned_gradients_off(
    tiny_base, tmp_path, mode
):
    def even(completion_ids, **kwargs):
        if mode is None:
            torch.set_grad_enabled(False)
        return [float(len(ids) % 2 == 0) for ids in completion_ids]

    try:
        with mode() if mode else contextlib.nullcontext():
            rows = train(config(tiny_base, tmp_path), reward_funcs=even, train_dataset=SUMS)
    finally:
        torch.set_grad_enabled(True)
    assert any(row["grad_norm"] > 0 for row in rows)


def test_an_async_reward_function_works_in_a_notebook(tiny_base, tmp_path):
    """There, the main thread already runs an event loop."""

    async def even(completion_ids, **kwargs):
        await asyncio.sleep(0)
        return [float(len(ids) % 2 == 0) for ids in completion_ids]

    async def cell() -> list[dict]:
        cfg = config(tiny_base, tmp_path, max_steps=1)
        return train(cfg, reward_funcs=even, train_dataset=SUMS)

    (row,) = asyncio.run(cell())
    assert row["rewards/even/mean"] == row["reward"]


def test_training_in_a_thread_needs_no_signals(tiny_base, tmp_path):
    rows: list[dict] = []
    cfg = config(tiny_base, tmp_path, max_steps=1)
    thread = threading.Thread(target=lambda: rows.extend(train(cfg, **GIVEN)))
    thread.start()
    thread.join()
    assert len(rows) == 1


def test_a_reward_function_may_have_a_name_with_dots(tiny_base, tmp_path, monkeypatch):
    """TRL's command line names functions in this way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/rewards.py").write_text(
        "def half(completions, share=0.5, **kwargs):\n    return [share] * len(completions)\n"
    )
    cfg = config(
        tiny_base, tmp_path / "run", max_steps=1, reward_funcs=["own.rewards.half:share=2"]
    )
    assert train(cfg, train_dataset=SUMS)[0]["rewards/half/mean"] == 2


CHAT = [{"question": row["prompt"], "result": row["answer"]} for row in SUMS]


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (
            lambda completions, completions_ids, **_: [],
            "; did you mean completion_ids? The data have the columns result",
        ),
        (lambda completions, result: [], "(at its call); add **kwargs to its parameters"),
        (
            lambda completions, **_: [re.search("a", text) for text in completions],
            "; completions are messages here, because the prompts are messages: the text of a",
        ),
        (
            lambda completions, **_: [c.strip() for c in completions],
            "text of a completion is compl",
        ),
    ],
)
def test_the_error_of_a_reward_function_says_what_to_do(tiny_base, tmp_path, function, advice):
    with refused(re.escape(advice)) as error:
        train(config(tiny_base, tmp_path), reward_funcs=function, train_dataset=CHAT)
    assert error.value._render_traceback_() == [f"error: {error.value}"]


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (GIVEN | {"reward_funcs": [3]}, {}, "3 is not a function"),
        ({"reward_funcs": "format"}, {}, "^data is missing"),
        (GIVEN | {"train_dataset": []}, {}, "data holds no prompts"),
        (GIVEN | {"train_dataset": [3]}, {}, "a record must be an object"),
        (GIVEN, {"data": ("x",)}, "data is set in"),
        (GIVEN, {"top_p": 2.0}, "^top_p is 2.0"),
        ({"tools": 3}, {}, "3 is not a function: pass one, or set its name in Config"),
        ({"tools": ["a.py:f"]}, {}, "'a.py:f' is not a function: pass one, or set its name"),
        ({"environment_factory": "a.py:F"}, {}, "'a.py:F' is not a function: pass one"),
        ({"environment_factory": dict}, {"environment_factory": "a.py:F"}, "is set in Config and"),
        ({"environment_factory": dict, "rollout": print}, {"data": ("a",)}, "^rollout cannot be"),
        ({"rollout": lambda prompts, trainer: {}}, {"data": ("a",)}, "has the signature of TRL's"),
        (GIVEN | {"beta_": 1}, {}, "beta_ is not an opt"),
    ],
)
def test_a_mistake_raises_one_sentence(tiny_base, tmp_path, given, options, message):
    with refused(message):
        train(config(tiny_base, tmp_path, **options), **given)


def test_values_with_a_text_of_their_own_are_kept_in_a_row():
    row = {"prompt": "1+1=", "day": datetime.date(2026, 1, 1), "n": np.int64(3), "x": np.ones(3)}
    assert sources.read([row]) == [("data, row 1", row)]


def test_a_model_has_a_name():
    with refused("model is a dict whose weights are not in any folder"):
        train({"model": "base"}, **GIVEN)
