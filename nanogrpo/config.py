"""All options of a run: one frozen dataclass, a comment a field. The command line is made from it
(cli.py).

In: values. Out: a `Config`; `validate` raises UserError with one sentence that names a wrong value
(rules.py). Names are those of TRL's GRPOConfig wherever the meaning is the same. `python train.py
--help` prints the comments below, under the headings below: they are the documentation. Read next:
train.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanogrpo import rules
from nanogrpo.rules import CHOICES, CLIPPED, LORA_TARGETS, NOT_NEGATIVE, POSITIVE, dashed

__all__ = ["CHOICES", "CLIPPED", "LORA_TARGETS", "NOT_NEGATIVE", "POSITIVE", "Config", "dashed"]


@dataclass(frozen=True)
class Config:
    # --- model and data
    # folder or hub id of a Qwen3 or Qwen2 checkpoint; warmup:STEPS: a tiny one, taught arithmetic
    # on the spot
    model: str = ""
    # training prompts: .jsonl, .parquet, folders of save_to_disk, a built-in task (arithmetic)
    data: tuple[str, ...] = ()
    # one per source: its share of the prompts drawn; empty: all are one data set
    data_weights: tuple[float, ...] = ()
    # held-out prompts for evaluation; empty: those that the training data bring, if any
    eval_data: tuple[str, ...] = ()
    dataset_train_split: str = "train"  # of a saved DatasetDict: the split that is trained on
    dataset_test_split: str = "test"  # of a saved DatasetDict: the split that is evaluated on
    output_dir: str = "runs/grpo"  # metrics.jsonl and checkpoints are written here
    enable_thinking: bool = True  # the thinking switch of Qwen3's chat template
    max_prompt_length: int = 0  # in tokens, after the chat template; 0: what the context leaves
    # longer prompts: refuse the data, with the line's number, or drop them, counted
    long_prompts: str = "refuse"
    # --- rewards
    # accuracy, format, length:N, module:name, file.py:name, model:FOLDER
    reward_funcs: tuple[str, ...] = ("accuracy", "format")
    reward_weights: tuple[float, ...] = ()  # one per reward function; empty: all 1
    # A minute: far beyond a judge's answer or a run of generated code, and twice that is far below
    # ddp_timeout.
    # seconds for one call of a module's or file's function; 0: no limit, no process of its own
    reward_timeout: float = 60.0
    # --- sampling
    num_generations: int = 8  # G, completions per prompt: the group that shares a baseline
    # completions per step: P*G, so P = generation_batch_size / num_generations prompts
    generation_batch_size: int = 64
    max_completion_length: int = 512  # longest completion in tokens, the stop token included
    temperature: float = 1.0  # of sampling, and so of every log-prob that is trained
    top_p: float = 1.0  # keep the smallest set of tokens with this probability; 1: all
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    min_p: float = 0.0  # drop tokens less likely than this fraction of the likeliest
    # what samples: local (our own decoder, in this process) or vllm (a server beside it)
    engine: str = "local"
    # sequences decoded at once by the embedded engine; a vLLM server decides itself
    max_concurrent: int = 64
    # writes completions in several turns, with tools: module:function or file.py:function; empty:
    # one turn
    rollout: str = ""
    # groups whose advantages are all 0 are replaced, up to so many times (DAPO); 0: never
    max_resample_times: int = 0
    # --- the vLLM server (--engine vllm)
    # addresses of running serve.py, such as http://127.0.0.1:8000; none: one is started, and ended
    server: tuple[str, ...] = ()
    # the interpreter that has vLLM, for a server started here; empty: $NANOGRPO_VLLM_PYTHON, or
    # this one
    vllm_python: str = ""
    # options for that server, as serve.py takes them, in one string: --vllm-options="--dtype half"
    vllm_options: str = ""
    # how weights travel: broadcast (any machines), memory (one machine, or one GPU)
    weight_transport: str = "broadcast"
    server_window: int = 64  # groups under way on a server at once
    # seconds in which a healthy server gives a sign of life, and takes the weights
    server_timeout: float = 60.0
    # seconds that a server which was not started here may be away before the run saves and stops
    server_patience: float = 600.0
    # steps that sampling may be ahead of training; 0: what is trained was sampled by the same
    # weights
    max_staleness: int = 0
    # log-probs under the ratio: trainer (its own), engine (as sampled), auto (engine's if stale)
    old_logp_from: str = "auto"
    # weigh by trainer/engine: off, token_truncate, token_mask, sequence_...
    vllm_importance_sampling_mode: str = "off"
    vllm_importance_sampling_clip_max: float = 3.0  # largest importance weight, trainer over engine
    vllm_importance_sampling_clip_min: float | None = None  # smallest importance weight; default: 0
    # --- objective
    # grpo, bnpo, dr_grpo, dapo, luspo (clip), cispo, sapo, vespo, dppo_tv, dppo_kl:
    # docs/equations.md
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"  # one ratio a token, or one a sequence (GSPO)
    # the ratio is clipped below at 1 - epsilon; dppo: the divergence that a bad token may gain
    epsilon: float = 0.2
    # the ratio is clipped above at 1 + this (cispo: at this, 5 in its paper); default: epsilon
    epsilon_high: float | None = None
    # upper bound of the ratio, where the clip leaves it free (A < 0); default: none
    delta: float | None = None
    # sapo: how soon the gradient of a good token fades as its ratio leaves 1
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05  # sapo: the same of a bad one
    vespo_k_pos: float = 2.0  # vespo: power of the sequence's ratio in its weight, where A >= 0
    vespo_lambda_pos: float = 3.0  # vespo: decay of that weight, where A >= 0
    vespo_k_neg: float = 3.0  # vespo: the power where A < 0
    vespo_lambda_neg: float = 2.0  # vespo: the decay where A < 0
    # dppo: factor of the squared log-ratio that is added to each token's loss; prime-rl takes 1e-3
    dppo_penalty: float = 0.0
    # weight of the KL penalty to the reference model; 0: no reference model is kept
    beta: float = 0.0
    # let the reference follow: now and then ref = alpha*policy + (1 - alpha)*ref
    sync_ref_model: bool = False
    # that alpha, the policy's part; 1: the reference becomes a copy of the policy
    ref_model_mixup_alpha: float = 0.6
    # steps between two such moves of the reference; beyond max_steps: none
    ref_model_sync_steps: int = 512
    # multiply the k3 estimate by the ratio, which makes its gradient exact
    use_bias_correction_kl: bool = True
    # leave completions that were cut at the length limit out of the loss
    mask_truncated_completions: bool = False
    # leave completions with A < 0 out whose mean log(engine/policy) is above this
    off_policy_mask_threshold: float | None = None
    # train only this share of the tokens, those where the policy was least certain; 1: all
    top_entropy_quantile: float = 1.0
    # weight of the entropy bonus, the mean over the trained tokens of an optimizer step; 0: none
    entropy_coef: float = 0.0
    # move entropy_coef after each optimizer step, to hold the entropy at entropy_target
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0  # adaptive: the coefficient goes no lower
    entropy_coef_max: float = 1.0  # adaptive: the coefficient goes no higher
    # adaptive: it goes up by this when the entropy was at or below the target, else down
    entropy_coef_delta: float = 0.005
    # adaptive: nats per token; there is no bonus while the entropy is above it
    entropy_target: float = 0.2
    # --- advantage
    # against the group's mean (grpo), the mean of the others (rloo), relative to it (maxrl)
    advantage_estimator: str = "grpo"
    # grpo: divide by the standard deviation of the group, the batch, or none
    scale_rewards: str = "group"
    # several rewards; normalize_then_sum: each is scaled alone (GDPO)
    multi_objective_aggregation: str = "sum_then_normalize"
    # --- optimisation
    max_steps: int = 100  # generations: each samples, scores and trains once
    num_iterations: int = 1  # passes over a generation
    # optimizer steps per pass: the generation is split into so many minibatches
    steps_per_generation: int = 1
    # completions of a prompt share one copy of its tokens; same gradient, fewer tokens
    share_prompts: bool = True
    # tokens per micro-batch: gradients accumulate over as many as a minibatch needs
    token_budget: int = 16384
    learning_rate: float = 1e-6  # at its peak, after the warm-up
    lr_scheduler_type: str = "constant"  # after the warm-up: constant, linear or cosine to zero
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    adam_beta1: float = 0.9  # decay of the mean of the gradients (AdamW)
    adam_beta2: float = 0.999  # decay of the mean of their squares (AdamW)
    adam_epsilon: float = 1e-8  # added to the root of the mean of squares (AdamW)
    weight_decay: float = 0.0  # decoupled (AdamW), on matrices only
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm; 0: never
    # --- adapters (LoRA)
    # rank of the adapters, which alone are trained: W + alpha/r*B*A; 0: none, all weights are
    # trained
    lora_r: int = 0
    lora_alpha: float = 32.0  # alpha, as in alpha/r
    # the layers that get adapters, such as q_proj v_proj; none named: all seven
    lora_target_modules: tuple[str, ...] = ()
    # adapters to begin with: a folder in PEFT's format; the reference of beta > 0 stays the base
    lora_adapter: str = ""
    # --- evaluation, logging, checkpoints
    # steps between two greedy evaluations of the held-out prompts, and before and after; 0: never
    eval_steps: int = 0
    eval_samples: int = 256  # held-out prompts evaluated, the first ones; 0: all
    # steps between two checkpoints, written beside training: what a crash can cost; 0: only the
    # last
    save_steps: int = 50
    save_total_limit: int = 2  # checkpoints kept, the newest ones; 0: all
    # take away what an earlier run left in output_dir, unless --resume goes on with it
    overwrite_output_dir: bool = False
    # beside metrics.jsonl: tensorboard (files in output_dir), wandb, or both
    report_to: tuple[str, ...] = ("none",)
    # write every completion with its rewards to output_dir/completions, one file a step
    log_completions: bool = False
    num_completions_to_print: int = 0  # completions shown in a table after each step; 0: none
    # the step (1: the first) that torch.profiler records in output_dir/trace-N.json; 0: none
    trace_step: int = 0
    # --- machine
    # computed again in the backward: none, full, selective (what is cheap)
    gradient_checkpointing: str = "none"
    torch_compile: bool = False  # compile each block; the first steps take minutes longer
    # or another that torch knows, such as aot_eager, which needs no C compiler
    torch_compile_backend: str = "inductor"
    # masters, gradients and moments in host memory; each block is sent when it computes
    cpu_offload: bool = False
    # give gathered blocks back after the forward (ZeRO-3); no: keep them (ZeRO-2)
    reshard_after_forward: bool = True
    # seconds that ranks wait for each other: at the start, and in each collective
    ddp_timeout: int = 600
    # seconds without a sign of life after which a rank counts as dead, and the others end
    heartbeat_timeout: int = 10
    seed: int = 0  # of everything: a run is a pure function of its seed on a CPU
    device: str = "auto"  # auto, cpu, cuda
    resume: bool = False  # continue from the last checkpoint of output_dir

    @property
    def base(self) -> str:
        """Folder or hub id of the weights that training starts from: of warmup:STEPS, where
        run.find_model makes them.
        """
        return f"{self.output_dir}/base" if self.model.startswith("warmup:") else self.model

    @property
    def prompts_per_step(self) -> int:
        """P."""
        return self.generation_batch_size // self.num_generations

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps a generation."""
        return self.num_iterations * self.steps_per_generation

    @property
    def on_policy(self) -> bool:
        """Whether the policy that is trained is the one that sampled: then the ratio is 1 and no
        old log-probs are needed.
        """
        return self.updates_per_step == 1 and not self.old_from_engine

    @property
    def old_from_engine(self) -> bool:
        """Whether the ratio is taken against the log-probs of the engine, whose weights may be
        older than the trainer's.
        """
        return self.old_logp_from == "engine" or (
            self.old_logp_from == "auto"
            and self.max_staleness > 0
            and self.vllm_importance_sampling_mode == "off"
        )

    @property
    def high(self) -> float:
        """epsilon_high, which is epsilon where it is not given."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def validate(self) -> None:
        """Raises UserError on the first value that cannot work, naming the option."""
        rules.check(self)
