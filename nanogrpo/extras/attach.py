"""A table of contents of the extras that attach to a run, and the condition for each.

`parse` first reads a command line with only the options of the core. If the core does not accept
the command line, `parse` reads it with the options of all extras. `attach` returns the features
that the options select, in the order in which they attach. Extras are imported only when they are
needed. On a CPU, the debug profile imports none. On a GPU, every run imports memory.py and
sharding.py. To add an extra, write a Feature (nanogrpo/feature.py) and its options in a new file.
Then add a line to SUMMARY below, an `if` to `wanted` below, and the options to options.py. Read
before: feature.py.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanogrpo import cli
from nanogrpo.config import Config
from nanogrpo.errors import UserError, read_json
from nanogrpo.feature import Feature
from nanogrpo.model import checkpoint
from nanogrpo.model.gpu_attention import BACKENDS
from nanogrpo.rewards import builtin
from nanogrpo.run import setup
from nanogrpo.run.setup import NOTHING

SUMMARY = """\
extras, off by default (--help-all has their options, and says more about each option above):
  --engine vllm               sample with vLLM servers (docs/vllm.md)
  --max-staleness             sample steps ahead of training
  --vllm-importance-sampling-mode  a correction for the gap between engine and trainer
  --loss-type, …              cispo, sapo, vespo, dppo, luspo; sequence-level ratios (GSPO)
  --bitwise, --head-dtype     the same bits in engine and trainer, or only logits in float32
  --dtype                     compute in float16 or bfloat16, also on a CPU (docs/precision.md)
  --ref-model, …              another reference model, or one that follows the policy
  --entropy-coef, …           an entropy bonus, or training on uncertain tokens only
  --advantage-estimator, …    rloo, maxrl, GDPO
  --max-resample-times        replace groups without a signal (DAPO's dynamic sampling)
  --tools, --rollout, …       tools, environments and rollout functions (docs/tools.md)
  --optim, …                  8-bit AdamW, its constants, all schedules of transformers
  --cpu-offload, …            how FSDP2 shards, and determinism on GPUs
  --lora-r, --load-in-4bit    train low-rank adapters, on weights in four bits
  --freeze-vision-tower       vision-language models (docs/vision.md)
  --dataset-config, …         data sets of the hub, CSV, Parquet, reasoning-gym (docs/data.md)
  --load-best-model-at-end    keep the best checkpoint
  --report-to                 TensorBoard, Trackio, Weights & Biases
  --log-completions, …        write and print the completions of each step
  --log-tokens                record every token for `nanogrpo view`
"""


def parse(argv: Sequence[str] | None = None, given: Any = NOTHING) -> Config:
    """Return the options of a run, not yet validated. If the core's `Config` does not accept the
    options, the full `Config` reads them, and its error messages cover all options. The options of
    a recipe replace the full `Config` (extras/recipe.py).
    """
    more = {"kind": given.options} if getattr(given, "options", None) else {}
    try:
        if not more:
            cfg = cli.parse(argv, Config, cli.parser(Config, epilog=SUMMARY))
            cfg.validate()
            if cfg.checkpointing != "selective":  # an extra, whose settings the core lacks
                return cfg
    except UserError:
        pass
    from nanogrpo.extras.commandline import parse as parse_all

    return parse_all(argv, **more)


Features = Callable[[Any], Sequence[Feature]]  # options → features


@dataclass(frozen=True)
class Given(setup.Given):
    """Python objects that replace names in the options of the core and the extras (api.py)."""

    tools: Sequence[Callable] = ()
    environment_factory: Callable | None = None
    rollout: Callable | None = None
    on_step: Callable | None = None
    features: Features = lambda cfg: ()
    options: type[Config] | None = None  # options of the command line; None: those of all extras


def attach(cfg: Config, given: setup.Given = NOTHING) -> list[Feature]:
    """Return the features of a run, in the order in which they attach."""
    features = [*wanted(cfg, Given(**vars(given)))]
    if features:
        from nanogrpo.extras.summary import Closing

        features.append(Closing())
    return features


def wanted(cfg: Any, given: Given) -> Iterator[Feature]:
    """Yield the features that the options, the data, the model or a GPU require, and those of a
    recipe.
    """
    gpu = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    full = gpu or type(cfg) is not Config
    if full:
        from nanogrpo.extras.options import complete

        cfg = complete(cfg)
    min_p = full and cfg.min_p
    if cfg.top_k or cfg.top_p < 1 or min_p:
        from nanogrpo.extras.truncation import Truncation

        # comes before the features that wrap the engine or read the batches
        yield Truncation(min_p)
    if full and (cfg.tools or cfg.environment_factory or cfg.rollout):
        from nanogrpo.extras.tools.feature import Tools

        # comes before the features that tokenize prompts
        yield Tools(cfg, given.tools, given.environment_factory, given.rollout)
    named = (*cfg.data, *cfg.eval_data)
    if given.on_step:
        from nanogrpo.extras.results import OnStep

        yield OnStep(given.on_step)
    sources = *named, given.train_dataset, given.eval_dataset
    # the core reads .jsonl files and lists
    if not all(isinstance(x, list | None) or str(x).endswith(".jsonl") for x in sources):
        from nanogrpo.extras.data.sources import Sources

        yield Sources(cfg)
    if "reasoning_gym" in " ".join((*named, *cfg.reward_funcs)):
        from nanogrpo.extras.gym.data import Gym

        yield Gym(cfg)
    # the features of a recipe come after all others
    last = [*given.features(cfg)]
    if not {name.partition(":")[0] for name in cfg.reward_funcs} <= builtin.BUILT_IN.keys():
        from nanogrpo.extras.reward_inputs import RewardInputs, asked
        from nanogrpo.extras.rewards import Rewards

        yield Rewards(cfg)
        if names := asked([*cfg.reward_funcs, *given.reward_funcs]):
            last.append(RewardInputs(names))  # wraps the engines of all features
    if cfg.model.startswith("warmup:"):
        raise UserError(
            "--model warmup:STEPS was removed: run `nanogrpo warmup FOLDER`, then use "
            "--model FOLDER."
        )
    source = checkpoint.locate(cfg.model)
    model, frozen = read_json(source / "config.json"), getattr(cfg, "freeze_vision_tower", False)
    if "default" not in str(model.get("rope_scaling") or model.get("rope_parameters") or "default"):
        import nanogrpo.extras.rope_scaling  # adds kinds of RoPE scaling
    if model.get("use_sliding_window") or model.get("model_type") in ("mistral", "ministral"):
        import nanogrpo.extras.window  # adds layers with a sliding window
    if os.environ.get("NANOGRPO_ATTENTION", "torch") not in BACKENDS:
        import nanogrpo.extras.two_calls  # noqa: F401 (adds implementations of attention)
    if "vision_config" in model or frozen:
        from nanogrpo.extras.vision.feature import Vision

        yield Vision(source, frozen)
    if not full:
        yield from last
        return
    if cfg.lora_r:
        from nanogrpo.extras.lora.feature import LoRA

        yield LoRA(cfg)
    if gpu:
        from nanogrpo.extras.memory import Memory

        yield Memory()
    sharding = {cfg.reshard_after_forward, cfg.reduce_gradients, cfg.dtype}
    selective = cfg.checkpointing == "selective"
    if gpu or cfg.cpu_offload or cfg.full_determinism or selective or sharding != {"auto"}:
        from nanogrpo.extras.sharding import Sharded

        yield Sharded(cfg)
    if cfg.bitwise:
        from nanogrpo.extras.bitwise import Bitwise

        yield Bitwise()
    if cfg.head_dtype == "float32":
        from nanogrpo.extras.head_dtype import HeadDtype

        yield HeadDtype()
    if cfg.dtype == "float16":
        from nanogrpo.extras.loss_scale import LossScale

        yield LossScale()
    if cfg.other_optimizer:
        from nanogrpo.extras.optim import Optim

        yield Optim(cfg)
    if cfg.ref_model:
        from nanogrpo.extras.reference import OtherReference

        yield OtherReference(cfg)
    if cfg.ref_model_sync_steps:
        from nanogrpo.extras.reference import SyncReference

        yield SyncReference()
    if cfg.max_staleness:
        from nanogrpo.extras.ahead import Ahead

        yield Ahead()
    if cfg.old_from_engine or cfg.vllm_importance_sampling_mode != "off":
        from nanogrpo.extras.importance import Importance

        yield Importance()
    if cfg.loss_type == "luspo" or cfg.needs_two_phases:
        from nanogrpo.extras.objectives import Objectives

        yield Objectives(cfg)
    if cfg.entropy_coef or cfg.top_entropy_quantile < 1:
        from nanogrpo.extras.entropy import Entropy

        yield Entropy()
    if (cfg.advantage_estimator, cfg.multi_objective_aggregation) != ("grpo", "sum_then_normalize"):
        from nanogrpo.extras.estimators import Estimators

        if any(type(feature).advantages is not Feature.advantages for feature in last):
            raise UserError(
                "--advantage-estimator and --multi-objective-aggregation cannot be used with a "
                "recipe that has its own `advantages`: leave them out."
            )
        yield Estimators(cfg)
    if cfg.max_resample_times:
        from nanogrpo.extras.resample import Resample

        yield Resample()
    if cfg.load_best_model_at_end:
        from nanogrpo.extras.best import Best

        yield Best()
    if cfg.report_to != ("none",):
        from nanogrpo.extras.dashboards import Dashboards

        yield Dashboards(cfg)
    if cfg.log_completions or cfg.num_completions_to_print:
        from nanogrpo.extras.completions import Completions

        yield Completions(cfg)
    if cfg.log_tokens:
        from nanogrpo.extras.view.tokens import TokenLog

        yield TokenLog(cfg)
    if cfg.engine == "vllm":
        from nanogrpo.vllm.feature import VLLM

        yield VLLM()
    yield from last
