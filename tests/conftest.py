"""Helpers and fixtures for all tests: a tiny random decoder and its checkpoint, strips of random
tokens, and the options and logs of complete runs.

    from tests.conftest import tiny_model, random_batch     # helpers are plain functions
    from tests.conftest import arguments, lines, steps      # options and log of a run
    def test_…(tiny_base, files): …                         # fixtures: folders, one per session
    def test_…(rows_of): rows_of("--beta 0.1 --max-steps 1")   # a run: the records of its steps

Without a GPU the Triton kernels run in Triton's interpreter. A kernel chooses it when defined, so
the environment is set here, before any module of the project is imported. No test uses the
network. Read next: model/test_decoder.py.
"""

# ruff: noqa: E402 (imports after the environment is set)

import contextlib
import dataclasses
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# a test that needs a download would pass on this machine and fail on others
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# trackio would otherwise write to the user's own projects; it reads this when it is imported
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")
# with one worker per core, more threads for tiny matrices only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import nanogrpo.extras.rope_scaling  # adds kinds of RoPE scaling
import nanogrpo.extras.window  # noqa: F401 (adds layers with a sliding window)
import train
from nanogrpo import Config
from nanogrpo import step as experience
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError, read_json
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.extras.vision.model import VisionDecoder
from nanogrpo.grpo import packing, schedule
from nanogrpo.model import checkpoint, dispatch
from nanogrpo.model.attention import StripAttention
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import PackedBatch, Prompt, Sample

# TRL needs Python 3.11, so parity with it is not tested on 3.10.
PEERS = [
    "grpo/test_trl_parity.py",
    "grpo/test_trl_objectives.py",
    "model/test_trl_nf4.py",
    "engine/test_trl_tools.py",
    "test_trl_options.py",
    "bench/test_peers.py",
    "bench/test_scripts.py",
    "rewards/test_trl_rewards.py",
    "vision/test_trl_vision.py",
]
collect_ignore = [] if sys.version_info >= (3, 11) else PEERS

# Use the same examples each time and do not limit their time, so a change never fails by chance.
SUITE = {
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("suite", **SUITE)
hypothesis.settings.load_profile("suite")

DEVICE = "cuda" if CUDA else "cpu"
SOLO = World(0, 1, torch.device("cpu"))  # one process


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # item.keywords also contains the names of folders, and a clone may be in one named gpu
        if not CUDA and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none"))


# --- models ---


def tiny_config(**changes) -> ModelConfig:
    """Return a Qwen3 of about 56,000 parameters: two layers, four query heads, two key heads, and a
    head size that differs from D / H.
    """
    tiny = ModelConfig(
        model_type="qwen3",
        vocab_size=151,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rope_theta=10_000.0,
    )
    return dataclasses.replace(tiny, **changes)


@torch.no_grad()
def tiny_model(
    cfg: ModelConfig | None = None, seed: int = 0, std: float = 0.2, **changes
) -> Decoder:
    """Return a random decoder with logits spread like a trained model's (a standard deviation of
    about 1 to 3).

    Norms and biases are random too. With the usual ones and zeros, no test would notice a norm or
    bias that is never applied.
    """
    cfg = cfg or tiny_config(**changes)
    model = (VisionDecoder if hasattr(cfg, "vision") else Decoder)(cfg)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        p.normal_(0.0, std, generator=generator)
        if "norm" in name and name.endswith("weight"):
            p.add_(1.0)
    return model


# --- strips of tokens ---


def random_tokens(n: int, vocab_size: int = 151, seed: int = 0) -> torch.Tensor:
    """Return n random tokens, [n] int64."""
    return torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


def positions_of(lengths: Sequence[int]) -> tuple[torch.Tensor, StripAttention]:
    """Return the positions [T] of sequences laid end to end, and their attention.

    >>> positions, attend = positions_of([3, 2])        # positions 0 1 2 0 1
    >>> model(tokens, positions, attend)                # logits [5, V]
    """
    positions = torch.cat([torch.arange(n) for n in lengths])  # [T]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()  # [N+1]
    return positions, StripAttention(cu_seqlens, max(lengths))


def random_batch(
    pairs: Sequence[tuple[int, int]], vocab_size: int = 151, seed: int = 0, off_policy: bool = True
) -> PackedBatch:
    """Return a strip of random samples with these (prompt, completion) lengths and random
    advantages. Off policy, the old log-probs are random too.

    >>> batch = random_batch([(2, 2), (2, 1)])          # as in types.py: T = 7, N = 2, M = 3
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [p + c for p, c in pairs]
    starts = torch.tensor([0, *lengths]).cumsum(0)  # [N+1]
    counts = torch.tensor([c for _, c in pairs])  # [N]
    M = int(counts.sum())
    tokens = torch.randint(vocab_size, (sum(lengths),), generator=generator)  # [T]
    rows = torch.cat([starts[i] + p - 1 + torch.arange(c) for i, (p, c) in enumerate(pairs)])  # [M]
    sampling_logp = -5 * torch.rand(M, generator=generator)  # [M]
    return PackedBatch(
        tokens=tokens,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=starts.to(torch.int32),
        max_len=max(lengths),
        kv_rows=None,
        kv_cu_seqlens=None,
        kv_max_len=0,
        rows=rows,
        targets=tokens[rows + 1],
        sample=torch.arange(len(pairs)).repeat_interleave(counts),
        advantage=torch.randn(len(pairs), generator=generator).repeat_interleave(counts),
        weight=torch.full((M,), 1.0 / M),
        sampling_logp=sampling_logp,
        old_logp=sampling_logp + 0.1 * torch.randn(M, generator=generator) if off_policy else None,
    )


def completion(prompt, ids, index=0, logp=-1.0, stopped=True, **fields) -> Sample:
    """Return a completion of these tokens, each with the same log-prob."""
    n = len(ids)
    return Sample(prompt, index, ids, [logp] * n, stopped, [0] * n, **fields)


def random_samples(group: int = 1) -> list[Sample]:
    """Return 12 completions of uneven lengths, a third of them truncated, with random advantages.
    The log-probs are around those of a random model. group: completions per prompt.
    """
    rng, out = random.Random(0), []
    for i in range(12):
        length = rng.choice([1, 2, 5, 9, 20])
        prompt = Prompt(i // group, "", [1 + i // group] * (2 + i // group))
        ids = [rng.randrange(151) for _ in range(length)]
        logp = [-4.0 + rng.gauss(0, 0.3) for _ in ids]
        s = Sample(prompt, i % group, ids, logp, i % 3 != 0, [0] * length)
        s.advantage = rng.gauss(0, 1)
        s.ref_logp = -4.5 + torch.tensor([rng.gauss(0, 0.5) for _ in ids])
        s.old_logp = -4.0 + torch.tensor([rng.gauss(0, 0.5) for _ in ids])
        out.append(s)
    return out


def packed(
    samples: Sequence[Sample], cfg: Config, all_gradients: bool = False
) -> list[PackedBatch]:
    """Return the micro-batches of one step. They include `s.old_logp` and `s.ref_logp` if a test
    has set them.
    """
    facts = [sample.facts._replace(all_gradients=all_gradients) for sample in samples]
    update = schedule.plan(range(len(samples)), facts, cfg)
    batches = list(packing.pack(update, samples, cfg))
    for batch in batches:
        members = batch.sample.unique_consecutive().tolist()
        for name in ("old_logp", "ref_logp"):
            if members and all(hasattr(samples[i], name) for i in members):
                setattr(batch, name, torch.cat([getattr(samples[i], name) for i in members]))
    return batches


def logp_of(model: Decoder, samples: Sequence[Sample], cfg: Config) -> list[torch.Tensor]:
    """Return the model's log-probs of each completion, computed in strips as the trainer does."""
    out: list[torch.Tensor] = [torch.empty(0)] * len(samples)
    for batch in packed(samples, cfg, all_gradients=True):
        logp = experience.logp(model, batch, cfg)
        for i in batch.sample.unique().tolist():
            out[i] = logp[batch.sample == i]
    return out


def logp_alone(model: Decoder, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Return the model's log-probs of a completion, from one forward over its sequence alone."""
    ids, own = torch.tensor(sample.prompt.token_ids + sample.token_ids), len(sample.token_ids)
    logp = (model(ids, *positions_of([len(ids)])) / temperature).log_softmax(-1)
    return logp[-own - 1 : -1].gather(1, ids[-own:, None])[:, 0]


def set_logp(model: Decoder, samples: Sequence[Sample], name: str, cfg: Config) -> None:
    """Set `sample.old_logp` or `sample.ref_logp` to the model's log-probs."""
    for sample, logp in zip(samples, logp_of(model, samples, cfg)):
        setattr(sample, name, logp)


# --- ops ---


@pytest.fixture
def reference_ops(monkeypatch) -> None:
    """Run the equations of kernels/reference/ on every device."""
    monkeypatch.setattr(dispatch, "choice", "torch")


def one_sentence(capsys) -> str:
    """Return the only error that a program has printed, which must be one sentence, last of all."""
    err = capsys.readouterr().err
    last = err.rstrip("\n").rpartition("\n")[2]
    assert last.startswith("error: "), err
    assert err.count("error: ") == 1, err
    assert "Traceback" not in err
    assert not re.search(r"[.!?] [A-Z]", last), f"more than one sentence: {err}"
    return last.removeprefix("error: ")


@contextlib.contextmanager
def refused(message: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a UserError of one line that matches this pattern, and yield it."""
    with pytest.raises(UserError, match=message) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Assert that the names and the bits of these tensors are equal."""
    assert set(a) == set(b)
    assert all(torch.equal(a[n], b[n]) for n in a)


# --- folders ---


def write_base(folder: Path, seed: int = 0, **changes) -> Path:
    """Write a checkpoint folder for --model: a random tiny model with the tokenizer of the built-in
    task.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = warmup.write_tokenizer(folder)
    model = tiny_model(tiny_config(**{"vocab_size": tokenizer.vocab_size, **changes}), seed)
    checkpoint.export(model, folder, tokenizer)
    return folder


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory) -> Path:
    """A checkpoint folder that all tests share. Read or copy it, but never write to it."""
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def tied_base(tmp_path_factory) -> Path:
    """The same with a tied head."""
    return write_base(tmp_path_factory.mktemp("base") / "tied", tie_word_embeddings=True)


@pytest.fixture
def tiny_tokenizer(tiny_base: Path):
    return warmup.Tokenizer(tiny_base)


# --- complete runs of train.py ---

REWARD = '''
"""Rewards for tests, dense enough to differ within every group of random completions."""
import itertools

def even(completion_ids, **kwargs):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

def even_by_token(completion_ids, **kwargs):
    return [[(i % 2 == 0) / len(ids) for i in ids] for ids in completion_ids]

def from_log_probs(completion_ids, logp, entropy, **kwargs):
    return [[round(x - h, 3) if i % 3 else None for i, x, h in zip(*each)]
            for each in zip(completion_ids, logp, entropy)]

def differs_for_some_prompts(prompts, completion_ids, **kwargs):
    pairs = zip(prompts, completion_ids)
    return [sum(ids) % 7 if "1" in p or "3" in p else 1.0 for p, ids in pairs]

def nothing_applies(completions, **kwargs):
    return [None] * len(completions)

calls = itertools.count()

def fails_in_the_third_step(completion_ids, **kwargs):
    if next(calls) == 2:
        raise ZeroDivisionError("no such luck")
    return even(completion_ids)
'''


def write_files(folder: Path) -> None:
    """Write a reward file and two small data sets."""
    (folder / "reward.py").write_text(REWARD)
    for name, prompts in {
        "data": [f"{i}+{i}=" for i in range(12)],
        "uneven": [f"{'1+' * i}1=" for i in range(9)],
    }.items():
        write_rows(folder / f"{name}.jsonl", [{"prompt": prompt} for prompt in prompts])


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    """A folder with a reward file and small data sets, good and bad."""
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    (folder / "empty.jsonl").write_text("\n\n")
    (folder / "broken.jsonl").write_text('{"prompt": "1="}\n{"prompt": "2="}\n{"prompt": \n')
    (folder / "long.jsonl").write_text(
        '{"prompt": "1="}\n' * 8 + json.dumps({"prompt": "9" * 300}) + "\n"
    )
    return folder


def arguments(base: Path, files: Path, output: Path, *options: str) -> list[str]:
    """Return the options of a run from random weights on 12 prompts, with 4 prompts of 4
    completions per step. Later options replace earlier ones. A text may have several options with
    their values, such as "--beta 0.1 --max-steps 1".
    """
    argv = ["--model", str(base), "--data", f"{files}/data.jsonl", "--output-dir", str(output)]
    argv += ["--reward-funcs", f"{files}/reward.py:even"]
    small = "--device cpu --num-generations 4 --generation-batch-size 16 --max-steps 3"
    for text in (f"{small} --max-completion-length 8 --learning-rate 1e-3", *options):
        argv += text.split() if re.match("--[a-z-]+ ", text) else [text]
    return argv


@pytest.fixture
def rows_of(tiny_base: Path, files: Path, tmp_path: Path):
    """A function that trains with these options, in which FILES stands for the folder of files, and
    returns the records of the steps.
    """

    def rows_of(options: str = "", *more: str, folder: str = "") -> list[dict]:
        options = options.replace("FILES", str(files))
        argv = arguments(tiny_base, files, tmp_path / folder, *options.split(), *more)
        assert train.main(argv) == 0
        return steps(tmp_path / folder)

    return rows_of


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """Write a file of JSON lines, and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(table: str) -> list[tuple[str, str]]:
    """Return the rows of a table: a line, and what belongs to it in the indented line below."""
    return re.findall(r"^(\S.*)\n    (.*)$", table, re.MULTILINE)


def said(content: object, role: str = "user") -> list[dict]:
    """Return a conversation of one message."""
    return [{"role": role, "content": content}]


def edit_json(path: Path, **fields) -> dict:
    """Change fields of the object in a JSON file, and return the object."""
    changed = {**read_json(path), **fields}
    path.write_text(json.dumps(changed))
    return changed


def read_rows(path: Path) -> list[dict]:
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def lines(output: Path) -> list[dict]:
    return read_rows(output / "metrics.jsonl")


def steps(output: Path) -> list[dict]:
    """Return the records of the steps, without measurements of time and memory."""
    return [timeless(row) for row in lines(output) if "reward" in row]


def timeless(row: dict) -> dict:
    """Return a record without the values that differ between two runs of the same command."""
    measured = ("time/", "throughput/", "memory/", "step_time", "tokens_per_second")
    return {name: value for name, value in row.items() if not name.startswith(measured)}
