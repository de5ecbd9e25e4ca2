"""Evaluate a checkpoint on held-out data: sample completions of each prompt, and score them.

    nanogrpo eval runs/demo/checkpoint-60 --data arithmetic
    nanogrpo eval Qwen/Qwen3-0.6B --data test.jsonl --num-generations-eval 8 \\
        --eval-temperature 0.6 --eval-top-p 0.95 --output-dir runs/eval

In: a checkpoint, prompts and reward functions, as for train.py. Evaluations during training have
the same options and the same metrics. Out: a table, output_dir/eval.json with its numbers, and
output_dir/eval.jsonl with every completion and its rewards. Read next: logs/metrics.py
(`of_evaluation`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
from pathlib import Path

from rich.table import Table
from rich.text import Text

from nanogrpo import cli
from nanogrpo.config import Config
from nanogrpo.distributed.world import World, join
from nanogrpo.errors import UserError
from nanogrpo.logs import completions, metrics, progress
from nanogrpo.logs.files import replace
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards.call import TrainerState
from nanogrpo.run import memory, setup
from nanogrpo.step import evaluation_sampling
from nanogrpo.types import Sample

DESCRIPTION = """Sample completions of held-out prompts with a checkpoint, and score them.

  nanogrpo eval runs/demo/checkpoint-60 --data arithmetic"""
OPTIONS = """
    model data dataset_config dataset_test_split prompt_column answer_column system_prompt
    enable_thinking chat_template_kwargs max_prompt_length long_prompts output_dir
    overwrite_output_dir reward_funcs reward_weights reward_timeout reward_env
    num_generations_eval eval_temperature eval_top_p eval_samples max_completion_length
    engine max_concurrent cache_tokens server vllm_python vllm_options vllm_gpus weight_transport
    server_window server_timeout server_patience seed device ddp_timeout heartbeat_timeout
"""
COMMAND = cli.Command("nanogrpo eval", DESCRIPTION, OPTIONS.split())


def evaluate(cfg: Config, world: World) -> tuple[dict[str, float], list[Sample]]:
    """Return the metrics over all ranks, and the samples of this rank. Every rank must call."""
    source = checkpoint.locate(cfg.model)
    tokenizer = Tokenizer(source)
    rewards = setup.make_rewards(cfg, world)
    model = checkpoint.empty_model(source)
    setup.check_vocabulary(tokenizer, model)
    vision = source if model.cfg.vision else None
    load = setup.prompt_loader(cfg, tokenizer, model.cfg.max_position_embeddings, vision=vision)
    prompts = setup.load_held_out(cfg, load, cfg.data)
    setup.check_answers(cfg, prompts)
    setup.load_sharded(model, source, world, cfg)
    max_len = max(len(p.token_ids) for p in prompts) + cfg.max_completion_length
    mine = world.part(prompts)
    cfg = memory.for_sampling(cfg, model, world, len(mine) * cfg.num_generations_eval)
    engine = setup.make_engine(cfg, world, model, source, max_len, 0)
    with contextlib.closing(engine):
        engine.load(model, version=0)
        params = evaluation_sampling(cfg, setup.sampling_params(cfg, tokenizer))
        samples = engine.sample(mine, cfg.num_generations_eval, params, step=0)
    for sample in samples:
        sample.text = tokenizer.decode(sample.token_ids)
    rewards.score(samples, TrainerState(1, 1, 1.0))  # the end of a run, for a curriculum
    row = metrics.of_evaluation(metrics.facts(samples, world), cfg.num_generations_eval)
    logged = rewards.metrics(world.gather)
    return {**row, **{f"eval/{name}": value for name, value in logged.items()}}, samples


def claim(folder: Path) -> None:
    """Create the output folder before anything is sampled, and check that it can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as e:
        raise UserError(
            f"--output-dir {folder} cannot be written ({e.strerror}): choose another folder."
        ) from e


def write(cfg: Config, row: dict[str, float], samples: list[Sample], world: World) -> None:
    """Write eval.json and eval.jsonl, and print the table. Every rank must call."""
    records = world.concat([completions.record(0, sample) for sample in samples])
    if not world.main:
        return
    for record in records:
        del record["step"], record["advantage"]  # they belong to training
        record.pop("images", None)  # only a run has their files
    folder = Path(cfg.output_dir)
    completions.write(folder / "eval.jsonl", records)
    given = {
        name: value for name, value in dataclasses.asdict(cfg).items() if name in COMMAND.options
    }
    text = json.dumps({"options": given, "metrics": row}, indent=2)
    replace(folder / "eval.json", f"{text}\n".encode())
    n = cfg.num_generations_eval
    table = Table()
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in row.items():
        table.add_row(Text(name.removeprefix("eval/")), f"{value:.4g}")
    with progress.output() as console:
        head = f"{cfg.model}: {len(records) // n} prompts, {n} completions of each"
        console.print(Text(head), soft_wrap=True)
        console.print(table)
        console.print(Text(f"the completions are in {folder / 'eval.jsonl'}"), soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        cfg = cli.parse(cli.with_model(argv), COMMAND)
        folder = cfg.output_dir if cfg.output_dir != Config.output_dir else "runs/eval"
        cfg = dataclasses.replace(cfg, output_dir=os.path.abspath(folder), eval_steps=1)
        cfg.validate()
        if Path(folder, "eval.json").exists() and not cfg.overwrite_output_dir:
            raise UserError(
                f"--output-dir {folder} already holds an evaluation: choose another folder, or "
                "replace it with --overwrite-output-dir."
            )
        lower = "a lower --max-concurrent or --cache-tokens"
        with join(cfg) as world, memory.explained(cfg, lower):
            world.once(lambda: claim(Path(cfg.output_dir)))
            row, samples = evaluate(cfg, world)
            write(cfg, row, samples, world)
    except (UserError, FloatingPointError) as e:  # FloatingPointError: the logits are not finite
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
