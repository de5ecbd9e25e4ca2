"""Evaluate a checkpoint on held-out data: sample completions of each prompt, and score them.

    nanogrpo eval runs/demo/checkpoint-60
    nanogrpo eval Qwen/Qwen3-0.6B --data test.jsonl --num-generations-eval 8 \\
        --eval-temperature 0.6 --output-dir runs/eval

In: a checkpoint, prompts and reward functions, as for train.py. Evaluations during training have
the same options and the same metrics. For a checkpoint of a run, the options in TAKEN have the
values of the run, unless you set them. Out: the metrics, printed and written to
output_dir/eval.json. The file output_dir/eval.jsonl contains all completions with their rewards.
Read next: logs/metrics.py (`of_evaluation`).
"""

import contextlib
import dataclasses
import json
import logging
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from nanogrpo import cli, step
from nanogrpo.data.prompts import load_held_out
from nanogrpo.distributed.world import World, join
from nanogrpo.errors import UserError
from nanogrpo.extras import commandline, completions, memory
from nanogrpo.extras.attach import attach
from nanogrpo.extras.memory import Memory
from nanogrpo.extras.options import Config
from nanogrpo.logs import metrics
from nanogrpo.logs.files import replace, writing
from nanogrpo.run import setup
from nanogrpo.types import Prompt

DESCRIPTION = """Sample completions of held-out prompts with a checkpoint, and score them. For a
checkpoint of a run, options that are not given are those of the run.

  nanogrpo eval runs/demo/checkpoint-60"""
TAKEN = """
    data dataset_config dataset_test_split prompt_column answer_column system_prompt
    enable_thinking chat_template_kwargs max_prompt_length long_prompts output_dir
    reward_funcs reward_weights reward_timeout
    num_generations_eval eval_temperature eval_samples max_completion_length top_k min_p seed
    head_dtype
"""
OPTIONS = f"""{TAKEN}
    model overwrite_output_dir engine max_concurrent cache_tokens server vllm_options vllm_gpus
    weight_transport server_timeout device ddp_timeout
"""
LOWER = "a lower --max-concurrent or --cache-tokens"
PROGRAM = cli.parser(Config, OPTIONS.split(), "nanogrpo eval MODEL [options]", DESCRIPTION)


def held_out(cfg: Config, *parts: Any) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts of --data. In an evaluation, this function replaces `load_prompts`."""
    tokenizer, context, features, given, _ = parts
    data = cfg.data if given is None else [given]
    return load_held_out(cfg, tokenizer, context, data, features), []


def evaluate(
    cfg: Config, world: World, given: setup.Given = setup.NOTHING
) -> tuple[dict[str, float], list[dict]]:
    """Return the metrics, and the completions with their rewards. Every rank must call it.

    given: Python objects that replace --reward-funcs and --data.
    """
    features = [feature for feature in attach(cfg, given) if not isinstance(feature, Memory)]
    inputs = setup.load(cfg, world, features, given, held_out)
    inputs.prompts, inputs.eval_prompts = [], inputs.prompts
    setup.settle(inputs)
    setup.load_weights(inputs.model, inputs).requires_grad_(False)
    cfg, n = cast(Config, inputs.cfg), cfg.num_generations_eval
    cfg = memory.for_sampling(cfg, inputs.model, world, len(world.part(inputs.eval_prompts)) * n)
    inputs.cfg = dataclasses.replace(cfg, max_steps=1)
    # the parts of a Run that are needed below, with the values that they have after one step
    sampling = setup.sampling_params(cfg, inputs.tokenizer)
    run: Any = SimpleNamespace(**vars(inputs), sampling=sampling, done=1, epoch=1.0)
    run.engine = engine = setup.make_engine(run)
    with contextlib.closing(engine):
        engine.load(inputs.model, version=0)
        samples = step.complete_held_out(run)
    row = metrics.of_evaluation(metrics.facts(samples, world), n)
    row |= {f"eval/{name}": value for name, value in inputs.rewards.metrics(world.gather).items()}
    records = world.concat([completions.record(0, sample) for sample in samples])
    for record in records:
        del record["step"], record["advantage"]  # only for training
    return row, records


def write(cfg: Config, row: dict[str, float], records: list[dict]) -> None:
    """Write eval.json and eval.jsonl, and print the metrics."""
    folder = Path(cfg.output_dir)
    completions.write(folder / "eval.jsonl", records)
    given = {name: getattr(cfg, name) for name in OPTIONS.split()}
    text = json.dumps({"options": given, "metrics": row}, indent=2)
    replace(folder / "eval.json", f"{text}\n".encode())
    lines = [f"{name.removeprefix('eval/'):40} {value:.4g}" for name, value in row.items()]
    lines.append(f"{len(records)} completions are in {folder / 'eval.jsonl'}")
    print(*lines, sep="\n")


def claim(cfg: Config) -> None:
    """Create the output folder, and check that it is writable. Raises UserError if the folder
    already has an evaluation, unless the option --overwrite-output-dir is on. The old files are
    replaced only at the end of the new evaluation.
    """
    folder = Path(cfg.output_dir)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if any(folder.glob("eval.json*")) and not cfg.overwrite_output_dir:
            raise UserError(
                f"--output-dir {folder} already holds an evaluation: choose another folder, or "
                "replace it with --overwrite-output-dir."
            )


def main(argv: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cfg = commandline.parse(argv, PROGRAM, TAKEN)
    folder = cfg.output_dir if cfg.output_dir != Config.output_dir else "runs/eval"
    cfg = dataclasses.replace(cfg, output_dir=os.path.abspath(folder), eval_steps=1)
    cfg.validate()
    with join(cfg) as world, memory.explained(cfg, LOWER):
        world.once(lambda: claim(cfg))
        found = evaluate(cfg, world)
        world.once(lambda: write(cfg, *found))
