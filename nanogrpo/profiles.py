"""Presets of options: `--profile debug` to try a change in seconds, `--profile full` to begin a
real run with.

In: a name. Out: options by name; a --config file and the command line go before them.
`--print-config` shows what came out. Read next: cli.py.
"""

from __future__ import annotations

PROFILES: dict[str, dict] = {
    # From nothing to the end in seconds on two CPU cores: `python train.py --profile debug`. Every
    # part of the loop runs: a base made on the spot, sampling, training, evaluation, checkpoints,
    # logs. It is too short to learn: `make demo` does that.
    "debug": {
        # answers in the right form now and then, which is enough for rewards to differ
        "model": "warmup:60",
        "data": ("arithmetic",),
        "output_dir": "runs/debug",
        "overwrite_output_dir": True,  # to be repeated after each change of the code
        "max_steps": 4,
        "num_generations": 8,
        "generation_batch_size": 32,
        "max_concurrent": 32,
        "max_completion_length": 32,
        "learning_rate": 1e-4,  # a tiny model takes large steps
        "eval_steps": 2,
        "eval_samples": 32,
        "save_steps": 2,
        "log_completions": True,
        "num_completions_to_print": 2,
    },
    # A start for 0.5 to 8 billion parameters on GPUs, for answers that can be verified: `--profile
    # full --model M --data D`. The values are those that published runs have in common (DAPO,
    # arXiv:2503.14476; TRL's defaults); nobody has tuned them here.
    "full": {
        "num_generations": 16,  # hard problems: fewer groups in which nobody is right
        "generation_batch_size": 512,  # 32 prompts a step
        # 128 completions an update: four updates for what sampling costs, the clip holds them
        "steps_per_generation": 4,
        "max_completion_length": 4096,  # room to reason; watch completions/clipped_ratio
        "epsilon_high": 0.28,  # DAPO's clip-higher: unlikely tokens may rise, entropy lasts longer
        "learning_rate": 1e-6,  # full weights
        "warmup_steps": 20,  # while AdamW's moments are still those of a few updates
        "max_grad_norm": 1.0,
        "max_steps": 500,
        "token_budget": 32768,  # one strip: as many completions as fit
        "gradient_checkpointing": "selective",  # keeps the matrix products, computes the rest again
        "max_concurrent": 256,  # of the embedded engine; with --engine vllm the server decides
        "eval_steps": 25,
        "save_steps": 25,
        "save_total_limit": 3,
        "log_completions": True,  # the first thing to look at when a reward rises too fast
        "num_completions_to_print": 1,
    },
}
