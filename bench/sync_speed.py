"""How long does a weight sync from the trainer to a real vLLM server take?

In: nothing. This file creates two random Qwen3 models, one with 0.3 M and one with about 100 M
parameters. --vllm-python is the Python of an environment with vLLM. Out: results/sync_speed.json
with the seconds of each sync for both transports, p50 and p95, and GB/s.

The time of a sync includes everything that the training loop waits for (nanogrpo/vllm/sync.py):
gathering the weights into buckets, pausing the server, transferring the buckets, loading them into
vLLM's fused layers, setting the weights' version, and resuming the server. After each block of
syncs, the server samples completions, and its log-probs are compared with the trainer's. So a fast
sync that transfers wrong weights would be noticed. The transports are measured alternately on the
same server. On a CPU, trainer and server run on the same machine and share its cores, so GB/s
measures copying rather than a network. vLLM's own sync engine is not measured, because it needs
GPUs. Read next: nanogrpo/vllm/sync.py.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import common, tables
from nanogrpo.engine.base import SamplingParams
from nanogrpo.extras.arithmetic.warmup import write_tokenizer
from nanogrpo.model import checkpoint
from nanogrpo.model.attention import StripAttention
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import Prompt
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Sidecar

TRANSPORTS = ("broadcast", "memory")
SHAPES = {  # D, F, layers, heads, key/value heads, head dimension, vocabulary
    "0.3M": (96, 256, 3, 4, 2, 32, 104),
    "100M": (768, 2304, 12, 12, 4, 64, 16384),
}


def make_base(folder: Path, shape: str) -> Decoder:
    """Return a random model of this shape, and write its checkpoint to `folder`."""
    D, F, L, H, K, E, V = SHAPES[shape]
    cfg = ModelConfig("qwen3", V, D, F, L, H, K, E, 256, rope_theta=1e4, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = Decoder(cfg).requires_grad_(False)
    folder.mkdir(parents=True)
    checkpoint.export(model, folder, write_tokenizer(folder))
    return model


@torch.inference_mode()
def largest_gap(model: Decoder, engine: VLLMEngine) -> float:
    """Return the largest difference between the server's and the trainer's log-probs."""
    params = SamplingParams(max_tokens=16)
    prompts = [Prompt(i, "", [3 + i, 4, 5]) for i in range(4)]
    worst = 0.0
    for s in engine.sample(prompts, 2, params, step=0):
        ids = torch.tensor(s.prompt.token_ids + s.token_ids)  # [T]
        attend = StripAttention(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        logp = model(ids, torch.arange(len(ids)), attend).log_softmax(-1)[2:-1]  # [tokens, V]
        logp = logp.gather(1, torch.tensor(s.token_ids)[:, None])[:, 0]  # [tokens]
        worst = max(worst, (logp - torch.tensor(s.logp)).abs().max().item())
    return worst


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "sync_speed",
        __doc__,
        repeats=(50, "timed syncs of the small model with each transport"),
        large_repeats=(15, "timed syncs of the large model with each transport"),
    )
    common.add_vllm(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

    records = []
    for shape, repeats in (("0.3M", args.repeats), ("100M", args.large_repeats)):
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "base"
            model = make_base(base, shape)
            options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "64"]
            python = args.vllm_python or sys.executable
            sidecar = Sidecar(base, options, python, Path(folder) / "serve.log")
            first = VLLMEngine(model, max_len=32, sidecar=sidecar, transport=TRANSPORTS[0])
            engines = {TRANSPORTS[0]: first}
            # Each additional transport gets its own client for the same server.
            server = first.servers[0]
            secret = server.headers["Authorization"].removeprefix("Bearer ")
            for transport in TRANSPORTS[1:]:
                engines[transport] = VLLMEngine(
                    model, max_len=32, urls=[server.url], secret=secret, transport=transport
                )
            # A server accepts one trainer at a time, so the transports alternate in blocks.
            # The first syncs of a block establish the connection and are not timed.
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(2):
                for name, engine in engines.items():
                    engine.servers[0].alive = False
                    sync = functools.partial(engine.load, model, 1)
                    for i in range(-2, repeats // 2):
                        with torch.no_grad():
                            model.model.norm.weight.add_(1e-3)
                        timing = common.interleave({name: sync}, 1, warmup=0)[name]
                        seconds[name] += timing.seconds if i >= 0 else []
                    gap = largest_gap(model, engine)
                    assert gap < 1e-4, f"the server's log-probs are off by {gap}: the sync failed"
            contents = first.sync.layout.contents
            nbytes = sum(end - start for each in contents for *_, start, end in each)
            for name in engines:
                timing = common.Timing(seconds[name])
                records.append(
                    common.record(
                        "sync_speed",
                        shape,
                        name,
                        argv,
                        timing,
                        seconds_p95=statistics.quantiles(timing.seconds, n=20)[-1],
                        bytes=nbytes,
                        gigabytes_per_second=nbytes / timing.median / 1e9,
                    )
                )
            first.close()
    common.write("sync_speed", records, args.out)
    return tables.report("sync_speed", args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
