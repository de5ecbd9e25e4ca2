"""More arguments for reward functions, each with one entry per token. A function gets the arguments
that are among its parameters.

    def surprise(logp, **kwargs):
        return [[-0.01 * x for x in each] for each in logp]      # a reward for each token

    logp     the engine's log-probs
    entropy  entropies over the full vocabulary in nats, which cost one more forward pass after
             sampling
    pieces   the texts of the tokens

In: the samples of the engine. Out: the same samples, with lists in `Sample.arguments`. For inserted
text, such as a tool's answer, the numbers are 0. If the data have a column with the same name, the
function gets this column. Read next: rewards/scorer.py.
"""

import ast
import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanogrpo.engine.base import Engine
from nanogrpo.extras.view.tokens import pieces
from nanogrpo.extras.wrapper import Wrapper
from nanogrpo.feature import Feature, first
from nanogrpo.grpo import packing, schedule
from nanogrpo.grpo.loss import logp_of
from nanogrpo.rewards import plugin
from nanogrpo.run.setup import Run
from nanogrpo.types import Sample

NAMES = {"logp", "entropy", "pieces"}


def asked(functions: Iterable[str | Callable]) -> set[str]:
    """Return the arguments in NAMES that at least one reward function has as a parameter.

    If a function is given by name, its source code is read to find the arguments. Only the reward
    process runs the code. The reward process also reports errors in the source code.
    """
    found: set[str] = set()
    for function in functions:
        if not isinstance(function, str):
            found |= inspect.signature(function).parameters.keys()
            continue
        where, _, name = plugin.split_arguments(function)[0].rpartition(":")
        with contextlib.suppress(OSError, SyntaxError, AttributeError, TypeError, ValueError):
            folders: Any = None
            # unlike importlib.util.find_spec, this loop does not run the code of the packages
            parts = [] if where.endswith(".py") else where.split(".")
            for module in accumulate(parts, "{}.{}".format):
                spec: Any = first(finder.find_spec(module, folders) for finder in sys.meta_path)
                where, folders = spec.origin, spec.submodule_search_locations
            for node in ast.parse(Path(where).read_bytes()).body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                    found |= {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
    return found & NAMES


class RewardInputs(Feature):
    def __init__(self, names: Collection[str]):
        self.names = names

    def wrap(self, engine: Engine, run: Run) -> Engine:
        return InformedEngine(engine, run, self.names)


class InformedEngine(Wrapper):
    """An engine that adds the arguments to the samples."""

    def __init__(self, engine: Engine, run: Run, names: Collection[str]):
        self.engine, self.run, self.names = engine, run, {*names}
        self.texts: dict[int, str] = {}

    def sample(self, *how: Any, **more: Any) -> list[Sample]:
        samples = self.engine.sample(*how, **more)
        for s in samples if "logp" in self.names else ():
            # plain numbers, because truncation.py uses objects with arrays
            s.arguments["logp"] = [*map(float, s.logp)]
        for s in samples if "pieces" in self.names else ():
            s.arguments["pieces"] = pieces(s.token_ids, self.run.tokenizer, self.texts)
        if "entropy" in self.names:
            add_entropies(self.run, samples)
        # a column of the data has priority; removed only now, because `add_entropies` communicates
        columns = {name for s in samples for name in s.prompt.columns}
        for s in samples:
            for name in columns & self.names:
                del s.arguments[name]
        return samples


@torch.no_grad()
def add_entropies(run: Run, samples: Sequence[Sample]) -> None:
    """Set the argument `entropy`: the policy's entropies, in nats, at the sampling temperature of
    training. Every rank must call this function.
    """
    cfg = dataclasses.replace(run.cfg, mask_truncated_completions=False)
    facts = [s.facts._replace(all_gradients=True) for s in samples]
    update = schedule.plan(range(len(samples)), facts, cfg)
    # each rank has its own samples, but all ranks have the same number of micro-batches
    most = max(run.world.gather(len(update.strips[0])))
    update.strips[0] += [[] for _ in range(most - len(update.strips[0]))]
    for s in samples:
        s.arguments["entropy"] = [0.0] * len(s.token_ids)
    for batch in packing.pack(update, samples, cfg, device=run.world.device):
        _, entropy = run.model.forward_strip(batch, logp_of(batch, cfg))
        for i in batch.sample.unique().tolist():
            each = np.zeros(len(samples[i].token_ids))
            each[samples[i].model_token_indices] = entropy[batch.sample == i].float().cpu()
            samples[i].arguments["entropy"] = each.tolist()
