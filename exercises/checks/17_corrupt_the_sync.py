"""Check exercise 17: run with the corruption, and run the test that should notice it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from exercises import tiny
from exercises.hints import expect, given

START = "Begin with docs/metrics.md, and find the metrics that compare the engine with the trainer."
ROOT = Path(__file__).resolve().parents[2]


def failures(test: str, answer: str) -> list[str]:
    """Return the names of the failed tests."""
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "-p", "exercises.corrupting"]
    command = [sys.executable, "-m", "pytest", *options, test]
    env = {**os.environ, "EXERCISE": answer}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    problem = (done.stderr or done.stdout).strip().rpartition("\n")[2]
    expect(done.returncode in (0, 1), f"pytest cannot run {test} ({problem}): try it by hand.")
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)


def check(answer) -> None:
    tools = map(importlib.util.find_spec, ("pytest", "hypothesis", "transformers"))
    expect(all(tools), "The tests need more packages: pip install -e '.[test]'.")
    given(answer.METRIC, "METRIC")
    given(answer.TEST, "TEST")
    changes = []

    def corrupt(name, weight):
        bad = given(answer.corrupt(name, weight.clone()), "corrupt")
        expect(bad.shape == weight.shape, f"`corrupt` changes the shape of {name}: keep it.")
        expect(bad.isfinite().all(), f"`corrupt` makes {name} infinite or NaN: the run would stop.")
        changes.append(float((bad - weight).abs().max()))
        return bad

    with tiny.corrupted(corrupt):
        after = tiny.run()
    expect(max(changes) > 1e-5, "`corrupt` changes nothing, or no more than rounding would.")
    before, metric = tiny.usual(), answer.METRIC
    expect(metric in after[0], f"There is no metric {metric!r}. docs/metrics.md lists them all.")
    good, bad = before[0][metric], after[0][metric]
    numbers = f"{metric} is {good:.3g} without the corruption and {bad:.3g} with it."
    expect(
        metric.startswith("sampling/"),
        f"{numbers} Another metric compares the log-probs of engine and trainer.",
    )
    expect(abs(bad) > 100 * abs(good) + 1e-4, f"{numbers} Corrupt the weights more.")
    expect(
        str(answer.TEST).startswith("tests/") and "::" in answer.TEST,
        "TEST must name one test, such as tests/engine/test_local.py::test_a_name.",
    )
    file, _, test = answer.TEST.partition("::")
    found = (ROOT / file).is_file() and f"def {test.split('[')[0]}(" in (ROOT / file).read_text()
    expect(found, f"There is no test {answer.TEST}. Copy its name from the file.")
    # without the parameters of the test: the plugin adds one
    failed = failures(answer.TEST.split("[")[0], str(Path(answer.__file__).resolve()))
    expect(
        any("corrupted-sync" in name for name in failed),
        f"The metric shows it, but {answer.TEST} passes all the same. Look for a test that samples"
        " with an engine, and compares its log-probs with those of the model.",
    )
    expect(
        not any("intact-sync" in name for name in failed),
        f"{answer.TEST} fails without the corruption too, so it proves nothing.",
    )
    print(f"   {metric}: {good:.2g} before, {bad:.2g} with the corruption")
