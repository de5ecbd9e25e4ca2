"""Build TRL's GRPOTrainer with our options and with TRL's fastest settings.

In: a `Config`, a checkpoint folder, prompts. Out: a trainer that is ready to train. Options that
exist in TRL are passed to TRL under the same name. The other settings are the fastest for the
models of the benchmarks: no gradient checkpointing, the full generation as one micro-batch, sdpa
attention, TRL's default fused head, and fused AdamW. On a CPU, TRL computes in float32, as nanogrpo
does. There are no data loader workers, no progress bar and no checkpoints. Read next: runs.py,
which runs both trainers, and trl_peer.py, which uses TRL's code without a trainer.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import torch
import transformers
import trl

from bench.trl_peer import SHARED
from nanogrpo import Config
from nanogrpo.data import prompts as data
from nanogrpo.types import Prompt

# Options with the same name and meaning.
SAME = (
    *SHARED,
    *("top_p", "top_k", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "seed"),
)


def options(cfg: Config, output_dir: Path, micro: int = 1) -> trl.GRPOConfig:
    """Return this config as TRL's options. `micro` is the number of micro-batches per optimizer
    step."""
    on_gpu = torch.cuda.is_available() and cfg.device != "cpu"
    four = on_gpu and os.environ.get("NANOGRPO_ATTENTION") == "flash4"  # then both trainers use it
    attention = "flash_attention_4" if four else "sdpa"
    return trl.GRPOConfig(
        output_dir=str(output_dir),
        use_cpu=not on_gpu,
        bf16=on_gpu,
        per_device_train_batch_size=cfg.generation_batch_size // (cfg.steps_per_generation * micro),
        steps_per_generation=cfg.steps_per_generation * micro,
        gradient_accumulation_steps=micro,
        gradient_checkpointing=False,
        shuffle_dataset=False,  # the prompts are already in the same order as in nanogrpo
        report_to="none",
        save_strategy="no",
        logging_steps=1,  # log every step, as nanogrpo does
        disable_tqdm=True,
        model_init_kwargs={"attn_implementation": attention, "dtype": torch.float32},
        **{name: getattr(cfg, name) for name in SAME},
    )


def trainer(
    cfg: Config,
    prompts: Sequence[Prompt],
    rewards: Sequence[Callable],
    output_dir: Path,
    micro: int = 1,
) -> trl.GRPOTrainer:
    """Return a trainer that uses the same prompts as nanogrpo in each step."""
    warnings.simplefilter("ignore", FutureWarning)  # TRL uses deprecated parts of transformers
    drawn = [
        p
        for step in range(cfg.max_steps)
        for p in data.draw(list(prompts), cfg.prompts_per_step, cfg.seed, step)
    ]
    return trl.GRPOTrainer(
        cfg.model,
        reward_funcs=list(rewards),
        args=options(cfg, output_dir, micro),
        train_dataset=datasets.Dataset.from_list([{"prompt": p.text, **p.columns} for p in drawn]),
        processing_class=transformers.AutoTokenizer.from_pretrained(cfg.model),
    )
