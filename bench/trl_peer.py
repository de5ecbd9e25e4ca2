"""Run TRL 1.16.0's own code for masks, advantages, losses and metrics on given samples, rewards and
log-probs.

    from bench.trl_peer import Peer, config, make_samples, settings, tables
    peer = Peer(settings(cfg), samples, rewards, NoModel(), logp=tables(0))
    batch = peer.batch()
    (loss,) = peer.losses(batch)

`Peer` is a `GRPOTrainer` without dataset or optimizer. A `Peer` has only the attributes that its
methods read. `advantages_of_both` and `losses_of_both` compute one case with TRL's code and with
nanogrpo's. tests/grpo/test_trl_parity.py checks that the results are equal, and parity_trl.py
tabulates the differences. Read next: parity_trl.py.
"""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace

import torch
import trl
from accelerate import Accelerator

from nanogrpo import Config
from nanogrpo.distributed.world import World
from nanogrpo.extras import entropy, objectives
from nanogrpo.extras.estimators import Estimators
from nanogrpo.extras.options import LOSS_CONSTANTS
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import schedule
from nanogrpo.grpo.advantages import step_advantages
from nanogrpo.logs import metrics
from nanogrpo.model.head import PolicyOut
from nanogrpo.types import Prompt, Sample

EOS, PAD = 5, 0
G = 4  # completions per prompt
LENGTHS = [3, 9, 1, 6, 12, 2, 12, 7]  # completion lengths, for two prompts
# Options with the same name in TRL.
SHARED = [
    "num_generations",
    "max_completion_length",
    "temperature",
    "loss_type",
    "scale_rewards",
    "epsilon",
    "epsilon_high",
    "delta",
    "beta",
    "use_bias_correction_kl",
    "mask_truncated_completions",
    "num_iterations",
    "entropy_coef",
    "importance_sampling_level",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "multi_objective_aggregation",
]
STOPPED = [True, True, True, False, False, True, True, True]
# metrics in addition to clip_ratio/*
OWN = ("kl", "entropy", "policy_loss", "entropy_coef", "cispo_clip_ratio", "vespo/phi_seq_mean")
SOLO = World(0, 1, torch.device("cpu"))  # one process

# The cases: rewards for comparing advantages, and options for comparing losses of each type.
REWARDS = {
    "plain": [1.0, 0.0, 0.25, 1.0, 0.5, 2.0, -1.0, 0.0],
    "equal": [0.1, 0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0],
    "some none": [None, 1.0, 0.0, None, 0.5, 0.25, None, 0.0],
    "one left": [None, None, 3.0, None, 0.5, 0.25, 1.0, 0.0],
    "a group of none": [None, None, None, None, 0.5, 0.25, 1.0, 0.0],
    "all none": [None] * 8,
    "all equal": [1.0] * 8,
}
# (rewards of the first function, rewards of the second function)
SEVERAL: dict[str, list[tuple]] = {
    name: list(zip(*rewards))
    for name, rewards in {
        "two": ([1, 0, 0, 1, 0, 0, 1, 0], [0.3, 0.1, 0.9, 0.9, 0.5, 0.5, 0.2, 0.1]),
        "one is constant": ([1, 1, 1, 1, 0, 0, 0, 0], [0.3, 0.1, 0.9, 0.9, 0.5, 0.5, 0.2, 0.1]),
        "some none": (
            [None, 0, None, 1, None, None, 1, None],
            [0.3, None, None, 0.9, 0.5, 0.5, 0.2, 0.1],
        ),
        "all none": ([None] * 8, [None] * 8),
        "all equal": ([0.1] * 8, [0.7] * 8),
    }.items()
}
# The loss types of TRL 1.16. A fork of nanogrpo may have more loss types.
LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
OBJECTIVES = {
    "plain": {},
    "narrow clip": {"epsilon": 0.05},
    "clip-higher": {"epsilon": 0.1, "epsilon_high": 0.3},
    "delta": {"epsilon": 0.2, "delta": 1.5},
    "delta inside the clip": {"epsilon": 0.1, "epsilon_high": 0.8, "delta": 1.3},
    "kl": {"beta": 0.3, "use_bias_correction_kl": False},
    "kl, corrected": {"beta": 0.3},
    "kl, corrected, delta": {"beta": 0.3, "delta": 1.5, "epsilon_high": 0.28},
    "sequence": {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
    "sequence, kl, corrected": {"importance_sampling_level": "sequence", "beta": 0.3},
    "engine corrected": {"vllm_importance_sampling_mode": "token_truncate", "beta": 0.3},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "off-policy mask, sequence, kl": {
        "off_policy_mask_threshold": 0.01,
        "importance_sampling_level": "sequence",
        "beta": 0.3,
    },
    "top entropy": {"top_entropy_quantile": 0.3, "beta": 0.3},
    "highest entropy": {"top_entropy_quantile": 0.0},
    "entropy bonus": {"entropy_coef": 0.2},
    "entropy bonus of the top": {"entropy_coef": 0.2, "top_entropy_quantile": 0.45},
    "other constants": {
        "loss_kwargs": {
            "sapo_temperature_pos": 2.0,
            "sapo_temperature_neg": 0.5,
            "vespo_k_pos": 1.0,
            "vespo_lambda_pos": 0.5,
            "vespo_k_neg": 0.7,
            "vespo_lambda_neg": 1.5,
        }
    },
    "everything": {
        "beta": 0.2,
        "epsilon_high": 0.4,
        "importance_sampling_level": "sequence",
        "off_policy_mask_threshold": 0.05,
        "top_entropy_quantile": 0.7,
        "entropy_coef": 0.1,
        "vllm_importance_sampling_mode": "token_mask",
    },
}


def pairs() -> list[tuple[str, str]]:
    """Return all valid pairs of a loss type and an objective."""
    return [
        (loss_type, name)
        for loss_type in LOSSES
        for name, options in OBJECTIVES.items()
        if not (loss_type == "vespo" and "top_entropy_quantile" in options)
    ]


def config(**options) -> Config:
    return Config(
        model="-",
        data=("-",),
        num_generations=G,
        generation_batch_size=8,
        max_completion_length=12,
        **options,
    )


def settings(cfg: Config, off_policy: bool = False) -> trl.GRPOConfig:
    """Return TRL's config with the options of `cfg`.

    For off-policy cases, each generation gets two optimizer steps, so that TRL computes old
    log-probs.
    """
    return trl.GRPOConfig(
        output_dir="unused",
        report_to="none",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=len(LENGTHS),
        steps_per_generation=2 if off_policy else 1,
        **{name: getattr(cfg, name) for name in SHARED},
        **cfg.loss_constants,
    )


def rows_of(rewards: list) -> list[tuple]:
    """Return the rewards of each sample. `rewards` contains a value or a tuple per sample."""
    return [row if isinstance(row, tuple) else (row,) for row in rewards]


class NoModel(torch.nn.Module):
    """A placeholder for the model, without weights. TRL reads only whether the model is in training
    mode.
    """

    is_gradient_checkpointing = False


class Peer(trl.GRPOTrainer):
    """TRL's trainer without its constructor, for given completions and rewards."""

    def __init__(self, args, samples, rewards, model, ref_model=None, logp=None, reward_weights=()):
        self.args, self.model, self.ref_model = args, model, ref_model
        self.accelerator = Accelerator(cpu=True)
        self.samples, self.rewards, self.logp = samples, rows_of(rewards), logp
        for name in (
            *SHARED,
            "use_adaptive_entropy",
            *LOSS_CONSTANTS["sapo"],
            *LOSS_CONSTANTS["vespo"],
        ):
            setattr(self, name, getattr(args, name))
        self.epsilon_low = args.epsilon
        self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        self.pad_to_multiple_of = self._entropy_window_stats = None
        self._entropy_bonus_enabled = args.entropy_coef != 0 or args.use_adaptive_entropy
        self._last_world_entropy = float("inf")
        self.use_vllm = self.aux_loss_enabled = self.log_multimodal = False
        self.environment_factories = self.environments = self.tools = None
        self._tokenizer, self.eos_token_ids = SimpleNamespace(pad_token_id=PAD), [EOS]
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        functions = len(self.rewards[0])
        self.reward_func_names = [f"given {i}" if i else "given" for i in range(functions)]
        self.reward_funcs = self.reward_func_names
        self.reward_weights = torch.tensor(reward_weights or [1.0] * functions, dtype=torch.float64)
        self._metrics = {"train": defaultdict(list)}
        self._logs = defaultdict(deque, rewards=defaultdict(deque))
        self._pending_extra_logs, self._pending_metrics = {}, {}

    def _generate(self, prompts):
        prompt_ids = [s.prompt.token_ids for s in self.samples]
        ids, texts = [s.token_ids for s in self.samples], [s.text for s in self.samples]
        logp = [s.logp for s in self.samples] if self.use_vllm else None
        return prompt_ids, ids, None, texts, logp, {}, None, []

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids):
        values = [[torch.nan if r is None else r for r in row] for row in self.rewards]
        return torch.tensor(values, dtype=torch.float64)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, **how
    ):
        if self.logp is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **how
            )
        name = "ref" if model is self.ref_model else "now" if torch.is_grad_enabled() else "old"
        rows = self.logp[name][self.taken] if name == "now" else self.logp[name]
        return rows, self.logp["entropy"][self.taken] if name == "now" else None, None

    def batch(self) -> dict:
        """Return TRL's batch, with padded ids, masks, advantages, log-probs and the normalizer."""
        prompts = [{"prompt": s.prompt.text} for s in self.samples]
        batch = self._generate_and_score_completions(prompts)
        # TRL divides the number of tokens by the number of updates.
        # In these cases, one update uses all tokens.
        updates = self.args.steps_per_generation // self.args.gradient_accumulation_steps
        batch["num_items_in_batch"] *= updates
        return batch

    def losses(self, batch: dict) -> list[torch.Tensor]:
        """Return one loss per micro-batch, in the order in which `training_step` would compute
        them.
        """
        out, size = [], self.args.per_device_train_batch_size
        for start in range(0, len(self.samples), size):
            self.taken = slice(start, start + size)
            part = {k: v[self.taken] if v.ndim else v for k, v in batch.items()}
            out.append(self._compute_loss(self.model, part))
        return out


def make_samples(seed: int = 0, vocab: int = 100) -> list[Sample]:
    """Return two groups of four completions, some truncated.

    Prompts and completions differ in length, so TRL pads on the left and on the right.
    """
    g = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> list[int]:
        return torch.randint(6, vocab, (n,), generator=g).tolist()

    prompts = [Prompt(0, "first", tokens(7)), Prompt(1, "second", tokens(3))]
    out = []
    for i, (n, stopped) in enumerate(zip(LENGTHS, STOPPED)):
        ids = tokens(n - 1) + [EOS] if stopped else tokens(n)
        out.append(Sample(prompts[i // G], i % G, ids, [0.0] * n, stopped, [0] * n))
    return out


def tables(seed: int) -> dict[str, torch.Tensor]:
    """Return random tables [8, 12] float64 by name. The tables "now", "old", "ref" and "engine"
    contain log-probs. "entropy" contains entropies, and "importance" contains factors around 1. The
    values vary so widely that every clip and bound applies to some token. Only "now" and "entropy"
    have gradients.
    """
    g = torch.Generator().manual_seed(seed)
    now = -3 * torch.rand(8, 12, generator=g, dtype=torch.float64)
    noise = torch.randn(4, 8, 12, generator=g, dtype=torch.float64)
    return {
        "now": now.requires_grad_(),
        "old": now.detach() + 0.5 * noise[0],
        "ref": now.detach() + 0.3 * noise[1],
        "engine": now.detach() + 0.5 * noise[2],
        # rounded to float32, as in nanogrpo
        "importance": (0.3 * noise[3]).exp().float().double(),
        "entropy": torch.rand(8, 12, generator=g).double().requires_grad_(),
    }


# --- one case with TRL's code and with ours ---


def give_rewards(samples: list[Sample], rewards: list, cfg: Config) -> torch.Tensor:
    """Set the samples' rewards (a value or a tuple per sample) and advantages, as the training loop
    does.

    Returns the standard deviations of the rewards.
    """
    rows = rows_of(rewards)
    for sample, row in zip(samples, rows):
        weights = cfg.reward_weights or [1.0] * len(row)
        given = [w * r for w, r in zip(weights, row) if r is not None]
        sample.reward = sum(given) if given else None
        sample.rewards = dict(zip(("given", "given 1"), row))
    advantages, std = step_advantages([s.reward for s in samples], cfg, rows, [Estimators(cfg)])
    for sample, advantage in zip(samples, advantages):
        sample.advantage = advantage
    return std


def advantages_of_both(cfg: Config, rewards: list) -> tuple[dict, dict]:
    """Return our results and TRL's results: "advantages" [8] float64, and metrics of the
    rewards."""
    samples = make_samples()
    peer = Peer(
        settings(cfg), samples, rewards, NoModel(), logp={}, reward_weights=cfg.reward_weights
    )
    theirs = {"advantages": peer.batch()["advantages"]}
    std = give_rewards(samples, rewards, cfg)
    row = metrics.of_samples(metrics.facts(samples, SOLO), std)
    ours = {"advantages": torch.tensor([s.advantage for s in samples], dtype=torch.float64)}
    for name, (expected, *_) in peer._metrics["train"].items():
        if not name.startswith("reward") and name != "frac_reward_zero_std":
            continue
        # If a metric has no value, TRL logs NaN, and nanogrpo logs nothing.
        theirs[name] = expected if expected == expected else 0.0
        ours[name] = row[name] if expected == expected else row.get(name, 0.0)
    return ours, theirs


def our_batch(
    samples: list[Sample], logp: dict[str, torch.Tensor], cfg: Config, off_policy: bool
) -> tuple[SimpleNamespace, tuple]:
    """Return our batch with the tables' values in float64, and the indices of its tokens in the
    tables.
    """
    n_tokens = schedule.plan(range(len(samples)), [s.facts for s in samples], cfg).n_tokens
    places = [
        (i, t)
        for i, s in enumerate(samples)
        if grpo.is_trained(s, cfg)
        for t in range(len(s.token_ids))
    ]
    index = tuple(torch.tensor(places).T)
    weight = [
        grpo.token_weight(len(samples[i].token_ids), len(samples), n_tokens, cfg) for i, _ in places
    ]
    batch = SimpleNamespace(
        sample=index[0],
        advantage=torch.tensor([samples[i].advantage for i, _ in places], dtype=torch.float64),
        weight=torch.tensor(weight, dtype=torch.float64),
        old_logp=logp["old"][index] if off_policy else None,
        ref_logp=logp["ref"][index] if cfg.beta else None,
        sampling_logp=logp["engine"][index],
        importance=logp["importance"][index]
        if cfg.vllm_importance_sampling_mode != "off"
        else None,
        entropy_weight=None,
    )
    entropy.prepare([batch], [logp["entropy"].detach()[index]], cfg, SOLO)
    return batch, index


def our_loss(
    samples: list[Sample], logp: dict[str, torch.Tensor], cfg: Config, off_policy: bool
) -> PolicyOut:
    """Return the result of `objectives.loss`, which supports all options. The fused head supports
    only the options of the clipped loss. Tests compare both losses.
    """
    batch, index = our_batch(samples, logp, cfg, off_policy)
    return objectives.loss(logp["now"][index], logp["entropy"][index], batch, cfg)


def their_batch(peer: Peer, cfg: Config, off_policy: bool) -> dict:
    """Return TRL's batch with the engine's log-probs and, if needed, importance weights."""
    batch = peer.batch()
    # TRL must use old log-probs in the same cases as nanogrpo
    assert ("old_per_token_logps" in batch) == off_policy
    batch["sampling_per_token_logps"] = peer.logp["engine"]
    if cfg.vllm_importance_sampling_mode != "off":
        peer.use_vllm = peer.vllm_importance_sampling_correction = True
        batch["importance_sampling_ratio"] = torch.where(
            batch["completion_mask"].bool(), peer.logp["importance"], 1.0
        )
    return batch


def losses_of_both(cfg: Config, off_policy: bool, seed: int) -> tuple[dict, dict]:
    """Return our results and TRL's results: "loss", "gradient", "entropy gradient", and metrics
    under TRL's names.

    The gradients [8, 12] float64 are with respect to the log-probs and the entropies.
    """
    samples, logp, rewards = make_samples(), tables(seed), REWARDS["plain"]
    peer = Peer(settings(cfg, off_policy=off_policy), samples, rewards, NoModel(), NoModel(), logp)
    batch = their_batch(peer, cfg, off_policy)
    # Both programs use TRL's advantages here. `advantages_of_both` compares the advantages.
    for sample, advantage in zip(samples, batch["advantages"].tolist()):
        sample.advantage = advantage

    def of(loss: torch.Tensor) -> dict:
        gradients = torch.autograd.grad(
            loss, (logp["now"], logp["entropy"]), materialize_grads=True
        )
        return {"loss": loss.item(), "gradient": gradients[0], "entropy gradient": gradients[1]}

    theirs = of(peer.losses(batch)[0])
    batch, index = our_batch(samples, logp, cfg, off_policy)
    out = objectives.loss(logp["now"][index], logp["entropy"][index], batch, cfg)
    ours = of(out.loss)

    meter, bonus = metrics.Meter(), entropy.Entropy()
    meter.add(batch, out)
    meter.end_update(0.0)
    bonus.measured(batch, out, 0)
    row = {**meter.summary(SOLO), **bonus.step(SimpleNamespace(cfg=cfg, world=SOLO), 0, samples)}
    names = {n for n in peer._metrics["train"] if n.startswith("clip_ratio/") or n in OWN}
    # TRL counts masked completions as unclipped sequences.
    if cfg.mask_truncated_completions and out.by_sequence:
        clips = ("clip_ratio/", "cispo_clip_ratio", "vespo/phi_seq_mean")
        names = {n for n in names if not n.startswith(clips)}
    theirs |= {name: peer._metrics["train"][name][0] for name in names}
    ours |= {name: row[name] for name in names}
    return ours, theirs
