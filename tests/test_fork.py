"""The examples of docs/fork.md are run as they stand. Read next: test_invariants.py."""

import gzip
import inspect
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nanogrpo
import train
from nanogrpo import Config
from nanogrpo import step as experience
from nanogrpo.engine.base import Engine
from nanogrpo.engine.local import LocalEngine
from nanogrpo.extras import objectives
from nanogrpo.extras.commandline import parse
from nanogrpo.extras.options import FIELDS
from nanogrpo.extras.recipe import main
from nanogrpo.extras.tools.turns import TurnsEngine
from nanogrpo.feature import Feature
from nanogrpo.grpo import advantages
from nanogrpo.grpo import loss as grpo
from nanogrpo.model.checkpoint import load_model
from nanogrpo.rewards import plugin
from nanogrpo.types import Prompt
from nanogrpo.vllm.client import VLLMEngine
from tests.conftest import (
    arguments,
    completion,
    logp_alone,
    one_sentence,
    packed,
    read_rows,
    steps,
    tiny_model,
)

ROOT = Path(train.__file__).parent
CALCULATOR = ROOT / "examples/calculator.py"
TEXT = (ROOT / "docs" / "fork.md").read_text()


def code(heading: str) -> str:
    """The first code block under a heading."""
    return re.search(rf"## {heading}\n.*?```python\n(.*?)```", TEXT, re.DOTALL)[1]


def example(heading: str) -> dict:
    """The names that this code defines."""
    names: dict = {}
    exec(code(heading), names)
    return names


def test_a_recipe_runs_from_any_folder_and_its_options_are_like_others(
    tiny_base, files, tmp_path, capsys
):
    (tmp_path / "median.py").write_text(code("The seam"))
    argv = arguments(tiny_base, files, tmp_path / "run", "--max-steps 2 --beta 0.1")
    command = [sys.executable, "median.py", *argv, "--median-baseline"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    assert all("median/good" in row for row in steps(tmp_path / "run"))
    median = plugin.load(f"{tmp_path / 'median.py'}:features", "").__globals__
    options = median["MedianOptions"]
    for words, words_of_the_error in (
        (["--resume"], "was written with median_baseline = True"),
        (["--median_baselin"], "use --median-baseline"),
        (["--median-baseline", "maybe"], "must be true or false"),
        (["--median-baseline", "--advantage-estimator", "rloo"], "has its own `advantages`"),
    ):
        assert main(options, median["features"], [*argv, *words]) == 2
        assert words_of_the_error in one_sentence(capsys)
    assert main(options, median["features"], ["--help"]) == 0
    text = capsys.readouterr().out
    assert "--median-baseline" in text
    assert "--learning-rate" not in text
    cfg = parse([*argv, "--overwrite-output-dir", "--median-baseline"], kind=options)
    assert "median/good" in nanogrpo.train(cfg, features=median["features"])[0]
    cfg, rewards = Config(num_generations=5), [1.0, 0.0, 0.0, 9.0, 2.0]
    values, _ = advantages.step_advantages(rewards, cfg, features=[median["Median"]()])
    assert values == [0.0, -1.0, -1.0, 8.0, 1.0]


@pytest.fixture
def gmpo(monkeypatch):
    """The example, and everything as it was afterwards."""
    for table in (objectives.TERMS, grpo.DIVISORS):
        monkeypatch.setitem(table, "gmpo", None)
    monkeypatch.setattr(FIELDS["loss_type"], "metadata", FIELDS["loss_type"].metadata)
    return example("A new loss")["gmpo"]


def test_gmpo_is_the_papers_equation_on_completions_of_any_length(gmpo):
    """Zhao et al. 2025 (2507.20673), equation 3: a mean over completions of
    Π_t min(r_t^s, clip(r_t, e^-ε, e^ε)^s)^(s/n) · A, where s is the sign of A.
    """
    model, cfg = tiny_model(), Config(epsilon=0.05, epsilon_high=0.08, loss_type="gmpo")
    prompt, lengths = Prompt(0, "", [1, 2, 3]), (2, 5, 9)
    samples = [
        completion(prompt, [5 + j] * n, j, advantage=a)
        for j, (n, a) in enumerate(zip(lengths, (1.0, -1.0, 0.5)))
    ]
    (batch,) = packed(samples, cfg)
    moved = torch.linspace(-0.1, 0.12, sum(lengths))  # log-ratios
    batch.old_logp = experience.logp(model, batch, cfg) - moved
    out = model.forward_strip(batch, grpo.objective(batch, cfg, [objectives.Objectives(cfg)]))
    expected = 0.0
    for s, ratios in zip(samples, moved.double().exp().split(lengths)):
        held = ratios.clamp(math.exp(-0.05), math.exp(0.08))
        pick = torch.minimum if s.advantage > 0 else torch.maximum
        expected -= pick(ratios, held).prod() ** (1 / len(ratios)) * s.advantage / len(samples)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_table_names_recipes_with_these_hooks_and_lines():
    rows = re.findall(r"^\| .*? \| (.*?) \| \[.*?\]\(\.\./(.*?)\) \| (\d+) \|$", TEXT, re.MULTILINE)
    recipes = ROOT / "examples/recipes"
    assert {ROOT / path for _, path, _ in rows} == {*recipes.glob("*.py")}
    for hooks, path, lines in rows:
        source = (ROOT / path).read_text()
        named = re.findall(r"`(\w+)`", hooks)
        assert named
        assert all(hasattr(Feature, name) and f"    def {name}(self" in source for name in named)
        assert code_lines(source) == int(lines) <= 60, path


def code_lines(source: str) -> int:
    """Return the number of lines without comments, docstrings and blank lines."""
    docstring, code = r'^ *"""(.|\n)*?"""$', r"^ *[^#\s]"
    return len(re.findall(code, re.sub(docstring, "", source, flags=re.MULTILINE), re.MULTILINE))


def test_a_baseline_with_a_state_is_resumed(tiny_base, files, tmp_path):
    """The state has an effect, and resampling calls the hooks of a step several times."""
    made = example("A baseline with a state")["LengthBaseline"]
    for folder, more in (("whole", "3"), ("parts", "1"), ("parts", "3 --resume")):
        options = f"--max-resample-times 1 --log-completions --max-steps {more}"
        argv = arguments(tiny_base, files, tmp_path / folder, options)
        assert main(Config, lambda cfg: [made()], argv) == 0
    rows = steps(tmp_path / "whole")
    assert rows == steps(tmp_path / "parts")
    assert len({row["length_baseline/mean"] for row in rows}) == 3
    written = read_rows(tmp_path / "whole/completions/completions_00002.jsonl")
    baselines = {round(row["even"] - row["advantage"], 4) for row in written}
    # most completions have eight tokens; a shorter one has another baseline
    assert round(16 * rows[0]["length_baseline/mean"], 4) in baselines


def test_completions_of_two_temperatures_have_the_log_probs_of_their_own(
    tiny_base, files, tmp_path
):
    """Groups are complete, and no two completions share an index. All rewards are 0, so all groups
    are sampled a second time.
    """
    feature, seen = example("Another way to sample")["Temperatures"](), []
    feature.scored = lambda run, samples, step: seen.extend(samples)
    options = "--vllm-importance-sampling-mode token_truncate --reward-funcs format"
    options += " --max-resample-times 1 --max-steps 1"
    argv = arguments(tiny_base, files, tmp_path, options)
    assert main(Config, lambda cfg: [feature], argv) == 0
    assert [s.index for s in seen] == [0, 1, 2, 3] * 4
    model = load_model(tiny_base)
    for s in seen:
        expected = logp_alone(model, s, 0.7 if s.index < 2 else 1.3)
        torch.testing.assert_close(torch.tensor(s.logp), expected, rtol=1e-4, atol=1e-5)


def test_the_credit_of_a_token_reaches_the_loss_and_the_token_log(tiny_base, files, tmp_path):
    feature, batches = example("An advantage for each token")["LateCredit"](), []
    feature.batches = lambda run, some: batches.extend(some)
    argv = arguments(tiny_base, files, tmp_path, "--log-completions", "--log-tokens")
    assert main(Config, lambda cfg: [feature], argv) == 0
    for batch in batches:
        for i in batch.sample.unique():
            share = batch.advantage[batch.sample == i]
            steps = torch.arange(1, len(share) + 1) / len(share)
            torch.testing.assert_close(share, share[-1] * steps)
    text = gzip.decompress((tmp_path / "completions/tokens_00003.jsonl.gz").read_bytes())
    rows = read_rows(tmp_path / "completions/completions_00003.jsonl")
    for line in map(json.loads, text.splitlines()):
        whole = rows[line["row"]]["advantage"]
        assert line["advantage"][-1] == pytest.approx(whole, rel=1e-3)


def test_the_default_loss_never_calls_its_term(rows_of, monkeypatch):
    monkeypatch.setitem(objectives.TERMS, "dapo", None)
    assert rows_of("--max-steps 1")[0]["grad_norm"] > 0


def test_gmpo_trains(rows_of, gmpo):
    rows = rows_of("--num-iterations 2 --loss-type gmpo --epsilon 3e-3 --learning-rate 1e-3")
    assert all(row["grad_norm"] > 0 and 0 < row["gmpo/cut"] < 1 for row in rows)


@pytest.mark.parametrize("rollout", ["", f"--rollout {CALCULATOR}:rollout"])
def test_an_engine_of_ones_own_trains(rows_of, monkeypatch, rollout):
    engine = example("Another engine")["Plain"]()
    feature, attach = Feature(), train.attach
    monkeypatch.setattr(feature, "engine", lambda run: engine)
    monkeypatch.setattr(train, "attach", lambda *given: [feature, *attach(*given)])
    rows = rows_of(f"--eval-steps 3 --eval-data FILES/data.jsonl --eval-samples 2 {rollout}")
    assert len(rows) == 3
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["sampling/sampling_logp_difference/max"] < 1e-5


@pytest.mark.parametrize("engine", [LocalEngine, TurnsEngine, VLLMEngine, "Plain"])
def test_every_engine_is_what_the_protocol_says(engine):
    """The parameters of its methods begin with those of the protocol, in order; what they have
    beside may be left out.
    """
    engine = example("Another engine")[engine] if isinstance(engine, str) else engine
    for name, asked in inspect.getmembers(Engine, inspect.isfunction):
        # those are of the engine inside
        if name.startswith("_") or (engine is TurnsEngine and name in ("load", "metrics", "close")):
            continue
        wanted = [*inspect.signature(asked).parameters.values()]
        found = [*inspect.signature(getattr(engine, name)).parameters.values()]
        assert [p.name for p in found[: len(wanted)]] == [p.name for p in wanted]
        assert [p.default for p in found[: len(wanted)]] == [p.default for p in wanted]
        assert all(p.default is not p.empty for p in found[len(wanted) :])


def test_the_rollout_runs_with_the_calculator_of_the_examples():
    """A model that writes "3+4=" reads "7"."""
    names = example("A rollout with tools")
    names["calculate"] = plugin.load(f"{CALCULATOR}:calculate", "")
    sample, told = completion(Prompt(0, "", [1]), [5], stopped=False, is_model_token=[True]), []

    class Turns:
        rounds = iter([[sample], []])

        def generate(self, samples, stop):
            assert stop == ("=",)
            return next(self.rounds)

        def text(self, sample):
            return "3+4="

        def observe(self, sample, answer):
            told.append(answer)

    names["rollout"]([sample], Turns())
    assert told == ["7"]
