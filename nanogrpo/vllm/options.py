"""The options of sampling with vLLM. Read next: feature.py."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanogrpo.config import Config, dashed, free_option, option

of_vllm = functools.partial(free_option, needs="engine=vllm")


@dataclass(frozen=True)
class VLLMOptions(Config):
    """vLLM: sample with vLLM servers."""

    engine: str = option(
        "local",
        "what generates the completions: our own decoder in the training process, or vLLM servers",
        choices=("local", "vllm"),
    )
    server: tuple[str, ...] = of_vllm(
        (),
        "addresses of running serve.py processes, such as http://127.0.0.1:8000; empty: start one"
        " for this run, with the Python interpreter $NANOGRPO_VLLM_PYTHON or the trainer's own",
        group="vLLM",
    )
    vllm_options: str = of_vllm(
        "", 'serve.py options for that server, as one string: --vllm-options="--dtype half"'
    )
    vllm_gpus: str = of_vllm(
        "",
        "numbers of that server's GPUs, such as 1 or 2,3 (tensor parallel); empty: share the"
        " trainer's first GPU",
    )
    vllm_enable_sleep_mode: bool = free_option(
        False,
        "on a shared GPU, free the server's memory while the trainer trains, and wake it to sample",
    )
    weight_transport: str = free_option(
        "auto",
        "how weights reach the servers: by torch.distributed between GPUs and machines, through the"
        " memory of the same GPU or machine, or whichever fits (auto)",
        choices=("auto", "broadcast", "memory"),
    )
    server_timeout: float = free_option(
        60.0,
        "seconds within which a healthy server answers a request, or accepts the weights",
        "> 0",
        "<= 1e7",
    )

    def problems(self) -> Iterator[str]:
        if self.engine == "local":
            return
        others: Any = self  # `self` has the options of all extras
        limited = self.top_k or others.min_p  # also in evaluations
        if self.eval_steps and self.eval_temperature and self.top_p < 1 and not limited:
            yield (
                f"--eval-temperature {self.eval_temperature} cannot be used with --top-p and"
                " --engine vllm, because evaluations are not truncated, and the server would return"
                " the ids of the whole vocabulary for each token: add --top-k or --min-p, or leave"
                " --eval-temperature out."
            )
        if not 0.01 <= self.temperature <= 2:
            yield (
                f"--temperature {self.temperature} is outside the range of vLLM: give a value"
                " between 0.01 and 2."
            )
        own = ("vllm_options", "vllm_gpus", "vllm_enable_sleep_mode")
        for name in own if self.server else ():
            if getattr(self, name):
                yield (
                    f"--{dashed(name)} is for a server that the trainer starts, but --server names"
                    " one that runs already: leave one of them out."
                )
        gpus = self.vllm_gpus.split(",")
        valid = all(gpu.isdecimal() for gpu in gpus) and len(set(gpus)) == len(gpus)
        if self.vllm_gpus and not valid:
            yield (
                f"--vllm-gpus is {self.vllm_gpus!r}: write different numbers, separated by"
                " commas, such as 2,3."
            )
        if self.vllm_enable_sleep_mode and others.max_staleness:
            yield (
                "--vllm-enable-sleep-mode cannot be used with --max-staleness, because the server"
                " then samples while the trainer trains: leave one of them out."
            )
        try:
            shlex.split(self.vllm_options)
        except ValueError as e:
            yield f"--vllm-options {self.vllm_options!r} cannot be split ({e}): close the quotes."
