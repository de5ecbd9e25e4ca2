"""Make requests for completions, and read the replies, with pure functions on JSON.

In: a prompt and SamplingParams, then a reply. Out: the body of `POST /inference/v1/generate`, then
`Sample`s, or an error that says why the reply cannot be used. The route takes token ids and returns
token ids. No text is tokenized again, so the tokens cannot change on the way. Read before:
engine/base.py. Read next: client.py, which sends the requests.
"""

import base64
import dataclasses
import hashlib
import shlex
from dataclasses import dataclass

import numpy as np

from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.errors import UserError, reading
from nanogrpo.extras import rope_scaling, window  # noqa: F401 (for all kinds of models)
from nanogrpo.extras.truncation import packed, with_sets
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import Prompt, Sample
from nanogrpo.vllm.server import ServerError

ALL = 1 << 30  # with this top_k, all tokens of any vocabulary are kept
SENTINEL = -9999.0  # vLLM's HTTP layer writes this number for a log-prob that is NaN or -inf
FLOAT32_LOGITS = ["--hf-overrides", '{"head_dtype": "float32"}']  # options of vLLM


@dataclass
class GroupRequest:
    """A request for the G completions of one prompt."""

    prompt: Prompt
    n: int
    body: dict  # the request without the fields that depend on the weight version
    samples: list[Sample] | None = None


def check_server(
    server: str,
    info: dict,
    cfg: ModelConfig,
    max_len: int,
    head_dtype: str = "model",
    dtype: str = "auto",
) -> None:
    """Raise UserError if a server cannot sample for this trainer.

    `info` is the server's description, from auth.describe. `head_dtype` is "float32" or "model", as
    in vLLM. `dtype` is "bfloat16", "float16", or "auto", which allows any dtype.
    """
    server = f"--server {server}"
    advice = "start serve.py with the checkpoint of --model"
    with reading(server, advice, "does not describe a model of this kind"):
        theirs = type(cfg).from_dict(info["config"], server)
    for name, x in vars(theirs).items():
        if x != (ours := getattr(cfg, name)):
            raise UserError(
                f"{server} serves a different model: its {name} is {x!r}, but --model has "
                f"{ours!r}; {advice}."
            )
    if (found := info["config"].get("head_dtype") or "model") != head_dtype:
        raise UserError(
            f"{server} has --head-dtype {found}, but the trainer has {head_dtype}: use the same "
            f"value on both sides; for float32, start serve.py with {shlex.join(FLOAT32_LOGITS)}."
        )
    if dtype not in ("auto", info["dtype"]):
        raise UserError(
            f"{server} computes in {info['dtype']}, but the trainer in {dtype}: start serve.py "
            f"with --dtype {dtype}, or give the trainer the dtype of the server."
        )
    if info["max_model_len"] < max_len:
        raise UserError(
            f"{server} has a context of {info['max_model_len']} tokens, but prompt and completion "
            f"need {max_len}; start serve.py with --max-model-len {max_len}, or lower "
            "--max-completion-length."
        )


def transport(wanted: str, server: str, info: dict, ours: dict[str, str]) -> str:
    """Return how weights reach a server: broadcast or memory.

    `wanted` is --weight-transport, `info` is the server's description, and `ours` is
    buckets.device_facts of the trainer. Raises UserError if no transport works, or if `wanted` does
    not work. NCCL connects only processes on different GPUs that have the same version of NCCL. A
    process can map only memory of its own GPU.
    """
    theirs, gpu = {*info["gpus"]}, ours["gpu"]
    if not theirs and not gpu:
        return "broadcast" if wanted == "auto" else wanted
    found = "memory" if gpu in theirs else "broadcast"
    if not theirs or not gpu:
        there, here = ("a GPU", "a CPU") if theirs else ("a CPU", "a GPU")
        problem = (
            f"computes on {there} but the trainer on {here}, so it cannot get the weights; start "
            "both on the same kind of device"
        )
    elif gpu in theirs and len(theirs) > 1:
        problem = (
            "uses the trainer's GPU and other GPUs, but no transport reaches both; give the server "
            "only the trainer's GPU, or only other GPUs"
        )
    elif wanted not in ("auto", found):
        where = "shares the trainer's GPU" if gpu in theirs else "is on another GPU"
        problem = f"{where}, where --weight-transport {wanted} cannot be used; leave it out"
    elif gpu not in theirs and info["nccl"] != ours["nccl"]:
        problem = (
            f"has NCCL {info['nccl']!r} but the trainer has {ours['nccl']!r}, and NCCL connects "
            "only identical versions; install the same torch for both"
        )
    else:
        return found
    raise UserError(f"--server {server} {problem}.")


def body(
    prompt: Prompt,
    n: int,
    params: SamplingParams,
    step: int,
    masks: bool = False,
    min_p: float = 0.0,
) -> dict:
    """Return the request for a group, with every sampling field, so that no default applies.

    vLLM seeds completion i of a request with seed + i. The seed is a hash of (seed, step, prompt),
    so the same request always returns the same completions, on any server at any time. `masks` says
    whether the server returns the tokens that the filters keep. Such a server refuses 0 for
    temperature and top_k.
    """
    temperature, top_k = params.temperature, params.top_k
    if masks:  # with a top_k of 1, sampling is greedy
        temperature, top_k = (temperature, top_k or ALL) if temperature else (1.0, 1)
    return {
        "token_ids": prompt.token_ids,
        "sampling_params": {
            # greedy completions are all equal, and vLLM refuses to sample more than one
            "n": n if params.temperature else 1,
            # 62 bits, so that seed + i fits into the 63 bits that vLLM allows
            "seed": stream(params.seed, step, prompt.id, 0) >> 1,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": params.top_p,
            "min_p": min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": prompt.max_tokens or params.max_tokens,
            "min_tokens": 0,
            "stop_token_ids": list(params.stop_token_ids),
            # stop only at our stop ids, even if the model's own end token is not among them
            "ignore_eos": True,
            "logprobs": 0,  # only of the sampled token
            "detokenize": False,
        },
    }


def pictures(prompt: Prompt, label: str) -> dict:
    """Return the fields of a request that are different for a prompt with pictures.

    vLLM gets each picture in the size that the model sees, so vLLM does not resize the picture. The
    server repeats the image token as often as needed. The name of a picture contains the label of
    the weights, so the encoder's results with older weights are never reused.
    """
    if not prompt.inputs:
        return {}
    token_ids, parts = [*prompt.token_ids], []
    for start, (height, width) in reversed([*zip(prompt.inputs.starts, prompt.inputs.sizes)]):
        del token_ids[start + 1 : start + height * width]
    for png in prompt.inputs.files():
        name = f"{label}.{hashlib.sha256(png).hexdigest()}"
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        parts.append({"type": "image_url", "url": url, "uuid": name})
    return {"token_ids": token_ids, "content_parts": parts, "return_token_ids": True}


def read(
    reply: dict,
    request: GroupRequest,
    known: dict[str, int],  # label → version, for the weights that may have sampled the tokens
    server: str,  # for error messages
) -> list[Sample]:
    """Return the group's n samples.

    Raises ServerError if the reply is incomplete, or was sampled from unknown weights, and
    FloatingPointError if a log-prob is not finite.
    """
    prompt, n, params = request.prompt, request.n, request.body["sampling_params"]

    def sample(choice: dict) -> Sample:
        ids, reason = choice["token_ids"], choice["finish_reason"]
        logp = [x["logprob"] for x in choice["logprobs"]["content"]]
        versions = []
        for span in choice["weight_versions"]:
            versions += [known.get(span["version"], -1)] * (span["end"] - span["start"])
        ends = [i for i, token in enumerate(ids, 1) if token in params["stop_token_ids"]]
        # a completion ends with its first stop token, or at the limit
        whole = len(ids) == len(logp) == len(versions) == min([*ends, params["max_tokens"]])
        if not whole or reason != ("stop" if ends else "length"):
            raise ServerError(
                f"{server} returned an incomplete completion of prompt {prompt.id} ({reason})"
            )
        if -1 in versions:
            raise ServerError(
                f"{server} sampled from weights that this trainer did not send: it was restarted, "
                "or another trainer uses it"
            )
        if not all(x > SENTINEL for x in logp):  # NaN compares as False
            raise FloatingPointError(
                f"{server} returned a log-prob of prompt {prompt.id} that is not finite at weight "
                f"version {versions[-1]}; the weights contain or cause NaN or infinity: look "
                "at the gradient norm of the preceding steps."
            )
        if params["top_k"]:
            if choice.get("sampling_mask") is None:
                raise UserError(
                    f"{server} does not return the masks that --top-k, --top-p and --min-p need: "
                    "start serve.py with --return-sampling-mask."
                )
            logp = with_sets(logp, [packed(np.array(kept)) for kept in choice["sampling_mask"]])
        return Sample(prompt, choice["index"], ids, logp, bool(ends), versions)

    samples = sorted(map(sample, reply["choices"]), key=lambda s: s.index)
    if prompt.inputs and reply["prompt_token_ids"] != prompt.token_ids:
        raise ServerError(
            f"{server} returned a prompt whose image tokens differ from ours: the server's "
            "preprocessor_config.json differs"
        )
    if params["n"] == 1:  # greedy sampling, or a group with one completion
        samples = [dataclasses.replace(s, index=i) for s in samples[:1] for i in range(n)]
    if len(samples) != n:
        raise ServerError(f"{server} returned {len(samples)} of {n} completions")
    return samples
