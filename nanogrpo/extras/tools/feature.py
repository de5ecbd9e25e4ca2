"""Attach tools, environments and rollout functions to a run.

In: --tools, --environment-factory and --rollout, or the objects themselves (extras/api.py). Out: a
wrapper around the engine (turns.py), the tools in the chat template, the reward function
`environment`, and two metrics. Read next: turns.py, calls.py, environments.py.
"""

import inspect
from collections.abc import Callable, Sequence
from threading import current_thread, main_thread
from typing import Any

from nanogrpo.engine.base import Engine
from nanogrpo.errors import UserError
from nanogrpo.extras.options import Config
from nanogrpo.extras.tools.calls import ToolCalls, schemas
from nanogrpo.extras.tools.environments import Environments
from nanogrpo.extras.tools.turns import TurnsEngine
from nanogrpo.feature import Feature
from nanogrpo.model.decoder import Decoder
from nanogrpo.rewards import plugin
from nanogrpo.run.setup import Inputs, Run
from nanogrpo.types import Prompt, Sample


class Tools(Feature):
    """The feature of --tools, --environment-factory and --rollout."""

    def __init__(
        self,
        cfg: Config,
        functions: Sequence[Callable] = (),
        environment_factory: Callable | None = None,
        rollout: Callable | None = None,
    ):
        """Import the functions and classes that the options name, unless the objects themselves are
        given.
        """
        self.cfg, self.rollout, factory = cfg, rollout, environment_factory
        self.calls: ToolCalls | None = None  # made as soon as there is a tokenizer
        self.functions = functions or [plugin.load(name, "--tools") for name in cfg.tools]
        if cfg.rollout and not rollout:
            self.rollout = plugin.load(cfg.rollout, "--rollout")
        if self.rollout and "prompts" in inspect.signature(self.rollout).parameters:
            raise UserError(
                f"--rollout: {cfg.rollout} has the signature of TRL's rollout_func: write a"
                " function (samples, turns) that calls turns.generate and turns.observe"
                " (docs/fork.md)."
            )
        if cfg.environment_factory and not factory:
            factory = plugin.load(cfg.environment_factory, "--environment-factory")
        if not self.rollout and cfg.tool_timeout and current_thread() is not main_thread():
            raise UserError(
                f"--tool-timeout {cfg.tool_timeout:g} needs a signal, which only the main thread "
                "receives: train in the main thread, or use --tool-timeout 0."
            )
        self.environments = Environments(factory, cfg.tool_timeout) if factory else None
        self.schemas = schemas(self.functions, self.environments) if not self.rollout else []
        self.own_reward = self.environments.reward() if self.environments else None
        if (self.own_reward is not None) != ("environment" in cfg.reward_funcs):
            raise UserError(
                "--reward-funcs environment calls get_reward of the class in "
                "--environment-factory: if the class has this method, add environment to "
                "--reward-funcs, and otherwise remove environment from --reward-funcs."
            )

    def reward(self, name: str, *_: Any) -> Callable | None:
        return self.own_reward if name == "environment" else None

    def model(self, model: Decoder, inputs: Inputs) -> None:
        """Check that the chat template of the model can show tools."""
        if self.rollout is None:
            self.calls = ToolCalls(self.cfg, inputs.tokenizer, self.functions, self.environments)

    def encode(self, prompt: Prompt, variables: dict, *_: Any) -> None:
        """Show the tools to the model. The chat template shows the tools to the model, so a plain
        text prompt becomes a message.
        """
        for name in {"turns", self.environments and "environments"} & prompt.columns.keys():
            raise UserError(f"reward functions get their own `{name}`: rename the column.")
        if not self.schemas:
            return
        if isinstance(prompt.text, str):
            prompt.text = [{"role": "user", "content": prompt.text}]
        run = self.cfg.chat_variables
        own = {n for n, x in variables.items() if n == "tools" or x != run.get(n)}
        # calls.py renders later turns, and prompts with observations, with the variables of the run
        if own if self.environments else own - {"documents"}:
            raise UserError(
                f"its columns or --chat-template-kwargs set {', '.join(sorted(own))}: remove them, "
                "or leave out --tools and --environment-factory."
            )
        variables["tools"] = self.schemas

    def settings(self, cfg: Any, inputs: Inputs) -> None:
        """Make room for the observations of environments, which make prompts longer."""
        if self.environments and self.calls:
            room = inputs.model.cfg.max_position_embeddings - cfg.max_completion_length
            longest = min(max(inputs.longest_prompt, cfg.max_prompt_length), room)
            self.calls.max_prompt_length = inputs.longest_prompt = longest

    def wrap(self, engine: Engine, run: Run) -> Engine:
        # Every tool call has a time limit, but all calls together may exceed the ranks' timeout.
        world = run.world.patient() if self.calls and self.cfg.tool_timeout else run.world
        function: Any = self.rollout or self.calls
        return TurnsEngine(engine, function, run.tokenizer, run.model.cfg.vocab_size, world.gather)

    def metrics(self, run: Run, samples: list[Sample]) -> dict[str, float]:
        """Return the calls per completion, and the fraction of the calls that failed."""
        if self.calls is None:
            return {}
        conversations: list[Any] = [s.conversation for s in samples]
        counts = run.world.concat([(c.calls, c.failures) for c in conversations])
        calls, failures = map(sum, zip(*counts))
        return {
            "tools/call_frequency": calls / len(counts),
            "tools/failure_frequency": failures / max(calls, 1),
        }
