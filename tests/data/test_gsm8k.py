"""The recipe examples/gsm8k: its command runs as it is written, and its rewards look for the format
that its prompt asks for.

Read next: examples/gsm8k/README.md.
"""

import re
import shlex
from pathlib import Path

import pytest

import train
from nanogrpo.extras.commandline import parse
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards.builtin import accuracy_reward
from nanogrpo.rewards.plugin import load
from tests.conftest import lines, read_rows, said, steps, tiny_config, tiny_model
from tests.data.hub_cache import fill_cache, write_repository
from tests.model.tokenizer_folder import make_folder

ROOT = Path(train.__file__).parent
RECIPE = ROOT / "examples" / "gsm8k"
ROWS = read_rows(Path(__file__).parent / "assets" / "gsm8k_tiny.jsonl")


def command(page: Path) -> list[str]:
    """Return the options of the command with openai/gsm8k on a page."""
    written = re.findall(r"^python train\.py (.*)$", page.read_text().replace("\\\n", " "), re.M)
    (found,) = [line for line in written if "openai/gsm8k" in line]
    return shlex.split(found)


@pytest.fixture
def chat_model(tmp_path):
    """A random model whose tokenizer has a chat template and knows every character."""
    tokenizer = Tokenizer(make_folder(tmp_path / "model"))
    model = tiny_model(tiny_config(vocab_size=tokenizer.vocab_size, max_position_embeddings=1024))
    checkpoint.export(model, tmp_path / "model", tokenizer)
    return tmp_path / "model"


@pytest.mark.parametrize(
    "page", [RECIPE / "README.md", ROOT / "README.md"], ids=["recipe", "readme"]
)
def test_the_command_runs_as_written_on_a_tiny_model_and_tiny_data(
    page, chat_model, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("datasets")
    repository = write_repository(tmp_path / "gsm8k", {"main": ROWS})
    fill_cache(monkeypatch, repository, "main", tmp_path / "cache", "openai/gsm8k")
    monkeypatch.chdir(ROOT)
    options = command(page)
    parse(options).validate()  # the options as they are, with their sizes
    # 6 of the 12 prompts per step, so an epoch has 2 steps
    smaller = "--num-generations 2 --generation-batch-size 12 --max-completion-length 8"
    smaller += " --eval-steps 2 --learning-rate 1e-3 --device cpu"
    smaller += "" if "--num-train-epochs" in options else " --max-steps 2"
    out = tmp_path / "run"
    changed = ["--model", str(chat_model), "--output-dir", str(out), *smaller.split()]
    assert train.main([*options, *changed, "--num-completions-to-print", "1"]) == 0
    assert len(steps(out)) == 2
    before, after = [row for row in lines(out) if "eval/after" in row]
    assert (before["eval/after"], after["eval/after"]) == (0, 2)
    for name in ("accuracy_reward", "boxed_last_line"):
        assert f"rewards/{name}/mean" in steps(out)[0]
        assert f"eval/rewards/{name}" in before


def test_the_rewards_look_for_the_format_that_the_prompt_asks_for():
    assert "\\boxed{}" in (RECIPE / "system.txt").read_text()
    boxed_last_line = load(f"{RECIPE / 'rewards.py'}:boxed_last_line", "--reward-funcs")
    for row in ROWS:
        steps_, _, result = row["answer"].rpartition("####")
        right = f"<think>\\boxed{{0}}</think>{steps_}\n\\boxed{{{result.strip()}}}\n"
        for completion in (right, said(right, "assistant")):
            assert boxed_last_line(completions=[completion]) == [1.0]
            assert accuracy_reward(completions=[completion], solution=[result.strip()]) == [1.0]
    wrong = [
        "",
        "18",
        "#### 18",
        "So \\boxed{18}",  # not a line of its own
        "\\boxed{18}\nThat is all.",
        "\\boxed{3}\n\\boxed{18}",
        "\\boxed{18 dollars}",
        "\\boxed{}",
        "\\boxed{18}</think>",
    ]
    assert boxed_last_line(completions=wrong) == [0.0] * len(wrong)
    assert boxed_last_line(completions=["a\n$\\boxed{1,234.5}$.", "\\boxed{-3}"]) == [1.0, 1.0]
