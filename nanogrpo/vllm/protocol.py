"""The requests for completions and their replies: pure functions on JSON.

In: a prompt and SamplingParams, then a reply. Out: the body of `POST /inference/v1/generate`, then
`Sample`s, or an error that says why the reply cannot be used. The route takes token ids
and returns token ids. No text is tokenized a second time, so the tokens cannot change in transit.
Read before: engine/base.py. Read next: client.py, which sends the requests.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from dataclasses import dataclass
from typing import Any

from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.errors import UserError
from nanogrpo.model import rope
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import Prompt, Sample
from nanogrpo.vllm.auth import FIELDS
from nanogrpo.vllm.buckets import DTYPES
from nanogrpo.vllm.server import ServerError, shown

SENTINEL = -9999.0  # vLLM's HTTP layer writes this for a log-prob that is NaN or -inf
ROUNDING = 1e-3  # a log-prob is at most 0, apart from rounding
WORKERS = 4096  # maximum number of workers of a server


@dataclass
class GroupRequest:
    """A request for the G completions of one prompt."""

    prompt: Prompt
    n: int
    body: dict  # without the fields that depend on the weight version
    samples: list[Sample] | None = None


def check_server(server: str, info: dict, cfg: ModelConfig, max_len: int, dtype: str) -> None:
    """Raise UserError if a server cannot sample for this trainer.

    info: the server's description, from auth.describe. dtype: the one required, or "" for any.
    """
    valid = {
        "model": isinstance(info.get("model"), dict),
        "vision": isinstance(info.get("vision"), dict),
        "images": is_integer(info.get("images"), 0, 1 << 31),
        "max_model_len": is_integer(info.get("max_model_len"), 1, 1 << 31),
        "dtype": info.get("dtype") in [*DTYPES],
        "workers": is_integer(info.get("workers"), 1, WORKERS),
        "gpus": isinstance(info.get("gpus"), list) and all(map(is_short, info["gpus"])),
        "nccl": is_short(info.get("nccl")),
    }
    for name in valid:
        if not valid[name]:
            raise UserError(
                f"--server {server} is not a sidecar of this project (its {name} is "
                f"{shown.repr(info.get(name))}); start it with serve.py."
            )
    fields = [(name, getattr(cfg, name), info["model"].get(name)) for name in FIELDS]
    if cfg.vision:
        fields[0] = ("model_type", f"{cfg.model_type}_vl_text", info["model"].get("model_type"))
        parts = dataclasses.asdict(cfg.vision).items()
        fields += [(f"vision_config.{name}", x, info["vision"].get(name)) for name, x in parts]
    for name, ours, theirs in fields:
        if isinstance(ours, rope.Scaling):
            ours = ours.to_dict()
        if isinstance(ours, tuple):
            ours = [*ours]  # as in JSON
        if ours != theirs:
            raise UserError(
                f"--server {server} serves another model: its {name} is {shown.repr(theirs)}, "
                f"but --model has {ours!r}; start serve.py with the same checkpoint."
            )
    if info["max_model_len"] < max_len:
        raise UserError(
            f"--server {server} has a context of {info['max_model_len']} tokens, but prompt and "
            f"completion need {max_len}; start serve.py with --max-model-len {max_len}, or lower "
            "--max-completion-length."
        )
    if dtype and info["dtype"] != dtype:
        raise UserError(
            f"--server {server} runs in {info['dtype']}, but another server runs in {dtype}; start "
            "all of them with the same --dtype."
        )


def transport(wanted: str, server: str, info: dict, ours: dict[str, str]) -> str:
    """Return how weights reach a server: broadcast or memory.

    wanted: --weight-transport. info: the server's description. ours: buckets.device_facts of the
    trainer. Raises UserError if they cannot, or not as wanted: NCCL connects only processes on
    different GPUs, with the same version of NCCL, and a process can map only memory of its own GPU.
    """
    theirs = {*info["gpus"]}
    if bool(theirs) != bool(ours["gpu"]):
        there, here = ("a GPU", "a CPU") if theirs else ("a CPU", "a GPU")
        raise UserError(
            f"--server {server} computes on {there} but the trainer on {here}, so it cannot get "
            "the weights; start both on the same kind of device."
        )
    if not theirs:
        return "broadcast" if wanted == "auto" else wanted
    shared = ours["gpu"] in theirs
    if shared and len(theirs) > 1:
        raise UserError(
            f"--server {server} uses the trainer's GPU and others, and no transport reaches both; "
            "give the server only that GPU, or only others."
        )
    found = "memory" if shared else "broadcast"
    if wanted not in ("auto", found):
        why = (
            "shares the trainer's GPU, and NCCL connects only different GPUs"
            if shared
            else "is on another GPU, which cannot map the trainer's memory"
        )
        raise UserError(
            f"--weight-transport {wanted} cannot be used, because {server} {why}; leave it out."
        )
    if not shared and info["nccl"] != ours["nccl"]:
        raise UserError(
            f"--server {server} has NCCL {shown.repr(info['nccl'])} but the trainer has "
            f"{ours['nccl']!r}, and NCCL connects only equal versions; install the same torch for "
            "both."
        )
    return found


def body(prompt: Prompt, n: int, params: SamplingParams, step: int) -> dict:
    """Return the request for a group, with every sampling field, so no default applies.

    vLLM seeds completion i of a request with seed + i. The seed is a hash of (seed, step, prompt),
    so the same request always returns the same completions, on any server at any time. Raises
    UserError for a filter: training cannot reproduce vLLM's log-probs after it.
    """
    for name, off in {"top_k": 0, "top_p": 1.0, "min_p": 0.0}.items():
        if params.temperature and getattr(params, name) != off:
            raise UserError(
                f"--{name.replace('_', '-')} {getattr(params, name)} cannot be used with --engine "
                f"vllm, because training cannot reproduce filtered log-probs: leave it at {off}."
            )
    return {
        "token_ids": prompt.token_ids,
        "sampling_params": {
            # all greedy completions are equal, and vLLM refuses to make more than one
            "n": n if params.temperature else 1,
            # 62 bits, so that seed + i fits into the 63 bits that vLLM allows
            "seed": stream(params.seed, step, prompt.id, 0) >> 1,
            "temperature": params.temperature,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": prompt.max_tokens or params.max_tokens,
            "min_tokens": 0,
            "stop_token_ids": list(params.stop_token_ids),
            # stop only at our stop ids, because the model's own end token may differ
            "ignore_eos": True,
            "logprobs": 0,  # only of the sampled token
            "detokenize": False,
        },
    }


def pictures(prompt: Prompt, label: str) -> dict:
    """Return the fields of the request that are different if the prompt has pictures.

    vLLM gets each picture as the model sees it, so that it does not resize it in its own way, and
    repeats its image token as often as needed. The name of a picture contains the label of the
    weights, so what the encoder computed with older weights is never reused.
    """
    if not prompt.images:
        return {}
    token_ids, parts = [*prompt.token_ids], []
    for start, (height, width) in reversed([*zip(prompt.images.starts, prompt.images.sizes)]):
        del token_ids[start + 1 : start + height * width]
    for png in prompt.images.files():
        name = f"{label}.{hashlib.sha256(png).hexdigest()}"
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        parts.append({"type": "image_url", "url": url, "uuid": name})
    return {"token_ids": token_ids, "content_parts": parts, "return_token_ids": True}


def is_paused(reply: dict, server: str) -> bool:
    """Return the answer to /is_paused."""
    paused = reply.get("is_paused")
    if type(paused) is not bool:
        raise ServerError(f"{server} does not say whether it is paused")
    return paused


def read(
    reply: dict,
    request: GroupRequest,
    known: dict[str, int],  # label → version, for the weights that may have sampled the tokens
    server: str,  # for error messages
    vocab_size: int,
) -> list[Sample]:
    """Return the group's n samples. Nothing in the reply is trusted.

    Raises ServerError if the reply is incomplete or impossible, or was sampled from unknown
    weights, and FloatingPointError if a log-prob is not finite.
    """
    prompt, n, params = request.prompt, request.n, request.body["sampling_params"]

    def require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise ServerError(f"{server} returned {otherwise} (prompt {prompt.id})")

    def sample(choice: dict) -> Sample:
        index, reason, ids = choice["index"], choice["finish_reason"], choice["token_ids"]
        if reason not in ("stop", "length"):  # aborted
            raise ServerError(
                f"{server} ended a completion of prompt {prompt.id} by {shown.repr(reason)}"
            )
        right = is_integer(index, 0, params["n"] - 1)
        require(right, f"a completion with index {shown.repr(index)}")
        require(0 < len(ids) <= params["max_tokens"], f"{len(ids)} tokens in a completion")
        right = {*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) < vocab_size
        require(right, "tokens outside the vocabulary")
        content = choice["logprobs"]["content"]
        require([x["token_id"] for x in content] == ids, "log-probs of other tokens")
        versions: list[int] = []
        for span in choice["weight_versions"]:
            start, end = span["start"], span["end"]
            follows = start == len(versions) and is_integer(end, start, len(ids))
            require(follows, "weight versions of other tokens")
            versions += [known.get(span["version"], -1)] * (end - start)
        if -1 in versions or len(versions) != len(ids):
            raise ServerError(
                f"{server} sampled from weights that this trainer did not send: it was restarted, "
                "or another trainer uses it"
            )
        logp = [x["logprob"] for x in content]
        kinds = {*map(type, logp)}
        require(kinds <= {int, float, type(None)}, "a log-prob that is not a number")
        if None in logp or not all(map(math.isfinite, logp)) or min(logp) <= SENTINEL:
            raise FloatingPointError(
                f"{server} returned a log-prob of prompt {prompt.id} that is not finite at weight "
                f"version {versions[-1]}; the weights contain NaN or infinity, or overflow: look "
                "at the gradient norm of the steps before."
            )
        require(max(logp) <= ROUNDING, f"a log-prob of {max(logp):g}, which is above 0")
        return Sample(prompt, index, ids, logp, reason == "stop", versions)

    try:
        choices = list(reply["choices"])
        require(len(choices) == params["n"], f"{len(choices)} of {params['n']} completions")
        require(
            not prompt.images or reply["prompt_token_ids"] == prompt.token_ids,
            "a prompt with other image tokens than ours: its preprocessor_config.json differs",
        )
        samples = sorted(map(sample, choices), key=lambda s: s.index)
    # a field is missing or of another kind; OverflowError: an integer with hundreds of digits
    except (KeyError, TypeError, IndexError, OverflowError) as e:
        raise ServerError(
            f"{server} returned an unexpected reply for prompt {prompt.id} ({e!r})"
        ) from e
    if len(samples) == 1:  # greedy, or a group of one
        samples = [dataclasses.replace(samples[0], index=i) for i in range(n)]
    require([s.index for s in samples] == list(range(n)), "a completion twice")
    return samples


def is_short(value: Any) -> bool:
    """Return whether a value from JSON is a short text."""
    return isinstance(value, str) and len(value) <= 100


def is_integer(value: Any, low: int, high: int) -> bool:
    """Return whether a value from JSON is one of the integers from low to high."""
    return type(value) is int and low <= value <= high
