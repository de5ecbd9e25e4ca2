"""The presets of `--profile`: debug (the complete loop in seconds) and full (a real run).

In: nothing. Out: options by name. The command line and the file of --config override the presets.
Read before: cli.py.
"""

from nanogrpo.cli import DEBUG

PROFILES: dict[str, dict] = {
    "debug": DEBUG,
    # For real runs on GPUs, with models of 0.5 to 8 billion parameters and verifiable answers.
    # The values are TRL's defaults, or common in published runs (DAPO, arXiv:2503.14476).
    # None of the values was tuned here.
    "full": {
        "num_generations": 16,  # with more completions, some of them solve even hard problems
        "generation_batch_size": 512,  # 32 prompts per step
        # four updates of 128 completions per generation; clipping limits the change of the policy
        "steps_per_generation": 4,
        "max_completion_length": 4096,  # raise this if completions/clipped_ratio is high
        # DAPO's clip-higher: unlikely tokens can become likelier, so entropy falls more slowly
        "epsilon_high": 0.28,
        "learning_rate": 1e-6,  # suitable for training all weights
        "warmup_steps": 20.0,  # AdamW's moments are unreliable during the first updates
        "max_grad_norm": 1.0,
        "max_steps": 500,
        "eval_steps": 25,
        "save_steps": 25,
        "save_total_limit": 3,
        "log_completions": True,  # if a reward rises suspiciously fast, read completions
        "num_completions_to_print": 1,
    },
}
