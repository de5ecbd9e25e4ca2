"""What is asked of vLLM for a group of completions, and how its answer becomes `Sample`s: pure
functions on JSON.

In: a prompt and SamplingParams → the body of `POST /inference/v1/generate`. In: its reply →
samples, or why not to trust it. The route takes token ids and gives token ids: no text is tokenized
twice, so none can come back as other tokens. Read before: rollout.py. Read next: vllm_engine.py,
which sends it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.errors import UserError
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import Prompt, Sample
from nanogrpo.vllm.auth import FIELDS
from nanogrpo.vllm.server import ServerError

SENTINEL = -9999.0  # what vLLM's HTTP layer writes for a log-prob that is NaN or -inf


@dataclass
class Group:
    """The G completions of one prompt, asked for in one request."""

    prompt: Prompt
    n: int
    body: dict  # without what depends on the weights' version
    samples: list[Sample] | None = None


def check(prompts: Sequence[Prompt], each: Sequence[SamplingParams], max_len: int) -> None:
    """Raises UserError on what cannot be sampled, or not so that it can be trained on. each: of
    each prompt.
    """
    for p, params in zip(prompts, each):
        for name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(params, name) != neutral and params.temperature > 0:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(params, name)} is for the embedded engine: vLLM's log-probs are those "
                    f"after the filter, which training cannot repeat; leave it at {neutral} with --engine vllm."
                )
        total = len(p.token_ids) + params.max_tokens
        if not p.token_ids or params.max_tokens < 1:
            raise UserError(
                f"Prompt {p.id} is empty or is asked for no token; give it a token and max_tokens of at least 1."
            )
        if total > max_len:
            raise UserError(
                f"Prompt {p.id} has {len(p.token_ids)} tokens and needs {total} with its completion, but the engine's context is "
                f"{max_len}; shorten the prompt or max_tokens, or raise the context."
            )


def fits(server: str, facts: dict, cfg: ModelConfig, max_len: int, dtype: str) -> None:
    """Raises UserError when a server cannot sample for a trainer. facts: what it says of itself.
    dtype: "" if any will do.
    """
    if not isinstance(facts.get("model"), dict):
        raise UserError(
            f"--server {server} is a server, but not a sidecar of this project; start it by serve.py."
        )
    for name in FIELDS:
        ours, theirs = getattr(cfg, name), facts["model"].get(name)
        if ours != theirs:
            raise UserError(
                f"--server {server} serves another model: its {name} is {theirs}, that of --model is {ours}; "
                "start serve.py with the same checkpoint."
            )
    if facts["max_model_len"] < max_len:
        raise UserError(
            f"--server {server} has a context of {facts['max_model_len']} tokens but prompt and completion need {max_len}; "
            f"start serve.py with --max-model-len {max_len}, or lower --max-completion-length."
        )
    if facts["dtype"] != (dtype or facts["dtype"]):
        raise UserError(
            f"--server {server} runs in {facts['dtype']}, not in {dtype}; start all with one --dtype."
        )


def ask(prompt: Prompt, n: int, params: SamplingParams, step: int) -> dict:
    """The request for a group: every field that vLLM samples by, so that none is left to a default
    of server or model.

    vLLM gives completion i of a request the seed + i, and the seed is a hash of (seed, step,
    prompt): so each completion's is a function of (seed, step, prompt, sample), and the same
    request gives the same completions, whenever and wherever it is sent.
    """
    greedy = params.temperature == 0
    return {
        "token_ids": prompt.token_ids,
        "sampling_params": {
            # n greedy completions are equal: vLLM refuses to make more than one
            "n": 1 if greedy else n,
            # 62 bits: with i added it stays within vLLM's 63
            "seed": stream(params.seed, step, prompt.id, 0) >> 1,
            "temperature": params.temperature,
            "top_k": 0 if greedy else params.top_k,
            "top_p": 1.0 if greedy else params.top_p,
            "min_p": 0.0 if greedy else params.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": params.max_tokens,
            "min_tokens": 0,
            "stop_token_ids": [] if params.ignore_stop else list(params.stop_token_ids),
            # only our stop ids stop: the model's own idea of an end token may be another
            "ignore_eos": True,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
        },
    }


def read(
    reply: dict,
    group: Group,
    # label → version, None for one that is not this trainer's
    version_of: Callable[[str], int | None],
    oldest: int,  # the version when the request was sent
    newest: int,  # and now: versions in between may have written some of the tokens
    server: str,  # for the messages
) -> list[Sample]:
    """The group's n samples. ServerError when the reply is not whole, FloatingPointError when a
    log-prob is not finite.
    """
    prompt, n = group.prompt, group.n
    try:
        samples = [_sample(c, prompt, version_of, oldest, newest, server) for c in reply["choices"]]
    except (KeyError, TypeError, IndexError) as e:
        raise ServerError(
            f"{server} returned something else than completions for prompt {prompt.id} ({e!r})"
        ) from e
    samples.sort(key=lambda s: s.index)
    if len(samples) == 1 == group.body["sampling_params"]["n"]:  # greedy, or a group of one
        samples = [dataclasses.replace(samples[0], index=i) for i in range(n)]
    if [s.index for s in samples] != list(range(n)):
        raise ServerError(
            f"{server} returned {len(samples)} of {n} completions of prompt {prompt.id}"
        )
    return samples


def _sample(
    choice: dict,
    prompt: Prompt,
    version_of: Callable[[str], int | None],
    oldest: int,
    newest: int,
    server: str,
) -> Sample:
    # aborted: the group is asked for again, as a whole
    if choice["finish_reason"] not in ("stop", "length"):
        raise ServerError(
            f"{server} ended a completion of prompt {prompt.id} by {choice['finish_reason']!r}"
        )
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    if not ids or [x["token_id"] for x in content] != ids:
        raise ServerError(
            f"{server} returned log-probs of other tokens than it sampled for prompt {prompt.id}"
        )
    logp = [x["logprob"] for x in content]
    # never neutralised: the weights are broken
    if not all(x is not None and math.isfinite(x) and x > SENTINEL for x in logp):
        raise FloatingPointError(
            f"{server} returned a log-prob of prompt {prompt.id} that is not finite at weight version {newest}; the weights hold "
            "NaN or infinity, or overflow: look at the gradient norm of the steps before."
        )
    versions: list[int] = []
    for span in choice["weight_versions"]:
        version = version_of(span["version"])
        versions += [-1 if version is None else version] * (span["end"] - span["start"])
    if len(versions) != len(ids) or not all(oldest <= v <= newest for v in versions):
        raise ServerError(
            f"{server} sampled from weights that are not this trainer's: it was restarted, or is shared"
        )
    return Sample(prompt, choice["index"], ids, logp, choice["finish_reason"] == "stop", versions)
