"""Helpers for the tests with a real vLLM: find its interpreter, start sidecars, measure the gap.

vLLM pins other versions of transformers than the tests, so it has its own environment (docs/vllm.md
explains how to make it): .venv-vllm next to .venv, or the one that NANOGRPO_VLLM_PYTHON names.
"""

import math
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from nanogrpo.engine.base import SamplingParams
from nanogrpo.model.decoder import Decoder, logits
from nanogrpo.model.head import HeadOp
from nanogrpo.types import Prompt, Sample
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Server, Sidecar
from tests.conftest import positions_of

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("NANOGRPO_VLLM_PYTHON") or str(ROOT / ".venv-vllm/bin/python")
CPU = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "384", "--max-num-seqs", "64"]


# variables of vLLM's environment: 1 GiB of cache, and cores that it shares with the tests
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

# vLLM's attention on CPUs needs heads of 32.
SIZES = {"head_dim": 32, "hidden_size": 64, "max_position_embeddings": 512}


def problem(i: int) -> str:
    """Return a word problem of 67 to 202 characters, each a token of the tests' tokenizer."""
    more = f" Then the baker takes {i + 20} rolls to the market." * (i % 4)
    return f"A baker fills {i + 10} trays with {i + 15} rolls each.{more} How many rolls are left?"


# as the chat template renders them: <|user|>, one token for each character, <|assistant|>
PROMPTS = [Prompt(i, "", [97, *(ord(c) - 30 for c in problem(i)), 98]) for i in range(6)]


@dataclass
class Real:
    """A running sidecar."""

    folder: Path  # the checkpoint that it serves
    process: Sidecar
    server: Server
    engines: list[VLLMEngine] = field(default_factory=list)

    def engine(self, model: Decoder, **options) -> VLLMEngine:
        for left in self.engines:  # by a test that failed; the server takes one trainer at a time
            if not left.over.is_set():
                left.close()
        options = {
            "max_len": 256,
            "urls": [self.server.url],
            "secret": self.process.secret,
        } | options
        self.engines.append(VLLMEngine(model, **options))
        return self.engines[-1]


def serve(folder: Path, *options: str) -> Iterator[Real]:
    """Serve a checkpoint until the generator is closed."""
    process = sidecar(folder, folder.parent / "serve.log", *options)
    yield Real(folder, process, process.start(60.0, threading.Event()))
    process.stop()


def params(temperature: float, **changes) -> SamplingParams:
    options = {"max_tokens": 24, "stop_token_ids": (99,), "seed": 1} | changes
    return SamplingParams(temperature=temperature, **options)


def require() -> None:
    """Skip the test without an interpreter that has vLLM, or fail if NANOGRPO_REQUIRE_VLLM is
    set.
    """
    if not Path(PYTHON).exists():
        assert not os.environ.get("NANOGRPO_REQUIRE_VLLM"), (
            f"NANOGRPO_REQUIRE_VLLM is set but {PYTHON} does not exist"
        )
        pytest.skip(f"needs a real vLLM, and {PYTHON} does not exist (docs/vllm.md)")


def sidecar(model: Path, output: Path, *options: str) -> Sidecar:
    """Return a sidecar that is not started."""
    require()
    for name, value in SMALL.items():
        os.environ.setdefault(name, value)
    return Sidecar(model, [*CPU, *options], PYTHON, output)


@torch.no_grad()
def trainer_logp(
    model: Decoder, sample: Sample, temperature: float, head: HeadOp = logits
) -> torch.Tensor:
    """Return the trainer's log-probs of a completion, [tokens] float32."""
    ids = torch.tensor(sample.prompt.token_ids + sample.token_ids)  # [T]
    images = [(0, sample.prompt.inputs)] if sample.prompt.inputs else []
    scores = model(ids, *positions_of([len(ids)]), None, head, *images).float()  # [T, V]
    logp = (scores / (temperature or 1.0)).log_softmax(-1)
    return logp[len(sample.prompt.token_ids) - 1 : -1].gather(
        1, torch.tensor(sample.token_ids)[:, None]
    )[:, 0]


def gap(
    model: Decoder, samples: Sequence[Sample], temperature: float, head: HeadOp = logits
) -> float:
    """Return the largest difference between the log-probs of trainer and server over all tokens."""
    return max(
        (trainer_logp(model, s, temperature, head) - torch.tensor(s.logp)).abs().max().item()
        for s in samples
    )


def check_syncs(
    engine: VLLMEngine,
    model: Decoder,
    prompts: Sequence[Prompt],
    first: torch.nn.Module,
    bound: float = math.inf,
) -> None:
    """Check that the log-probs agree after every sync, and that the weights have moved before the
    next. first: the part of the model whose weights move before the second sync. The completions of
    the first prompt must depend on it. bound: the largest difference of log-probs.
    """
    for version in range(3):
        engine.load(model, version)
        for temperature in (1.0, 0.7, 0.0):
            samples = engine.sample(prompts, 4, params(temperature), step=version)
            assert len(samples) == 4 * len(prompts)
            assert {v for s in samples for v in s.versions} == {version}
            # the rounding of the logits is divided by the temperature, as they are
            assert gap(model, samples, temperature) <= min(bound, 1e-5 / (temperature or 1.0))
            again = engine.sample(prompts[::-1], 4, params(temperature), step=version)
            # seeds, not neighbours, decide
            assert [s.token_ids for s in again[-4:]] == [s.token_ids for s in samples[:4]]
        train_a_little(model if version else first, seed=version)
        # so the next round shows that the weights really moved
        assert gap(model, samples[:4], 0.0) > 1e-3
    engine.close()


@torch.no_grad()
def train_a_little(model: torch.nn.Module, seed: int) -> None:
    """Move every weight, as a training step would, and far enough to be measured."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=generator))


def label(server: Server) -> str:
    """Return the label of the server's weights, which it reports with a token."""
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    ((span,),) = [
        c["weight_versions"] for c in server.post("/inference/v1/generate", body)["choices"]
    ]
    return span["version"]


def raw(server: Server, path: str, body: bytes) -> int:
    """Return the status of a POST."""
    connection = server.kind(server.host, server.port, timeout=30)
    connection.request("POST", path, body, server.headers)
    status = connection.getresponse().status
    connection.close()
    return status


def processes(server: int) -> list[int]:
    """Return the ids of the process `server` and all its descendants."""
    table = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = int(stat.parent.name), stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended meanwhile
            continue
        table[pid] = int(rest[1])
    pids = [server]
    for pid in pids:
        pids += [p for p, parent in table.items() if parent == pid]
    return pids


def shared_memory(pids: list[int]) -> set[Path]:
    """Return the segments of shared memory that Python has created for these processes."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {Path(path) for path in re.findall(r"/dev/shm/psm_\w+", maps)}
