"""TRL 1.16.0 as a peer: its own code for masks, advantages, losses and metrics, on samples, rewards and log-probs that are given.

    from bench.trl_peer import Peer, config, make_samples, settings, tables
    peer = Peer(settings(cfg), samples, rewards, NoModel(), logp=tables(0));  batch = peer.batch();  (loss,) = peer.losses(batch)

`Peer` is a `GRPOTrainer` with the attributes its methods read, without the dataset and optimizer it never meets here.
`advantages_of_both` and `losses_of_both` compute one case with TRL's code and with ours: tests/test_trl_parity.py holds them
equal, parity_trl.py tabulates their differences. Read next: parity_trl.py.
"""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace

import torch
import trl
from accelerate import Accelerator

from nanogrpo import grpo, metrics, ops, packing
from nanogrpo.batch import Prompt, Sample
from nanogrpo.config import CHOICES, Config
from nanogrpo.world import World

EOS, PAD = 5, 0
G = 4  # completions a prompt
LENGTHS = [3, 9, 1, 6, 12, 2, 12, 7]  # of the completions of two prompts
SHARED = ("num_generations", "max_completion_length", "temperature", "loss_type", "scale_rewards", "epsilon", "epsilon_high")
SHARED += ("delta", "beta", "use_bias_correction_kl", "mask_truncated_completions", "num_iterations")  # options of both
STOPPED = [True, True, True, False, False, True, True, True]
SOLO = World(0, 1, torch.device("cpu"))  # one process

# The cases: of advantages, rewards by kind; of losses, what each type is combined with.
REWARDS = {
    "plain": [1.0, 0.0, 0.25, 1.0, 0.5, 2.0, -1.0, 0.0],
    "equal": [0.1, 0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0],
    "some none": [None, 1.0, 0.0, None, 0.5, 0.25, None, 0.0],
    "one left": [None, None, 3.0, None, 0.5, 0.25, 1.0, 0.0],
    "a group of none": [None, None, None, None, 0.5, 0.25, 1.0, 0.0],
    "all none": [None] * 8,
    "all equal": [1.0] * 8,
}
LOSSES = CHOICES["loss_type"]
OBJECTIVES = {
    "plain": {},
    "narrow clip": {"epsilon": 0.05},
    "clip-higher": {"epsilon": 0.1, "epsilon_high": 0.3},
    "delta": {"epsilon": 0.2, "delta": 1.5},
    "delta inside the clip": {"epsilon": 0.1, "epsilon_high": 0.8, "delta": 1.3},
    "kl": {"beta": 0.3, "use_bias_correction_kl": False},
    "kl, corrected": {"beta": 0.3},
    "kl, corrected, delta": {"beta": 0.3, "delta": 1.5, "epsilon_high": 0.28},
}


def config(**options) -> Config:
    return Config(model="-", data="-", num_generations=G, generation_batch_size=8, max_completion_length=12, **options)


def settings(cfg: Config, accumulation: int = 1, off_policy: bool = False) -> trl.GRPOConfig:
    """The same options as TRL's own config. Off policy: half as much accumulation, so that TRL takes old log-probs itself."""
    return trl.GRPOConfig(
        output_dir="unused",
        report_to="none",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=len(LENGTHS) // accumulation,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * (2 if off_policy else 1),
        **{name: getattr(cfg, name) for name in SHARED},
    )


class NoModel(torch.nn.Module):
    """Stands where TRL asks for a model; only its mode is read."""

    is_gradient_checkpointing = False


class Peer(trl.GRPOTrainer):
    """TRL's trainer without its constructor: what is generated and how it is rewarded is given, the rest is its own."""

    def __init__(self, args, samples, rewards, model, ref_model=None, logp=None):
        self.args, self.model, self.ref_model, self.accelerator = args, model, ref_model, Accelerator(cpu=True)
        self.samples, self.rewards, self.logp = samples, rewards, logp
        for name in SHARED:
            setattr(self, name, getattr(args, name))
        self.epsilon_low = args.epsilon
        self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        self.importance_sampling_level, self.multi_objective_aggregation = "token", "sum_then_normalize"
        self.top_entropy_quantile, self.off_policy_mask_threshold, self.pad_to_multiple_of = 1.0, None, None
        self.use_vllm = self.aux_loss_enabled = self._entropy_bonus_enabled = self.log_multimodal = False
        self.environment_factories = self.environments = self.tools = None
        self._tokenizer, self.eos_token_ids = SimpleNamespace(pad_token_id=PAD), [EOS]
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self.reward_funcs = self.reward_func_names = ["given"]
        self.reward_weights = torch.ones(1, dtype=torch.float64)
        self._metrics = {"train": defaultdict(list)}
        self._logs = defaultdict(deque, rewards=defaultdict(deque))
        self._pending_extra_logs, self._pending_metrics = {}, {}

    def _generate(self, prompts):
        ids = [s.token_ids for s in self.samples]
        return [s.prompt.token_ids for s in self.samples], ids, None, [s.text for s in self.samples], None, {}, None, []

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids):
        return torch.tensor([[torch.nan if r is None else r] for r in self.rewards], dtype=torch.float64)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **how):
        if self.logp is None:
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, **how)
        name = "ref" if model is self.ref_model else "now" if torch.is_grad_enabled() else "old"
        rows = self.logp[name][self.taken] if name == "now" else self.logp[name]
        return rows, rows.detach().square(), None  # the entropies only need to be some numbers

    def batch(self) -> dict:
        """What TRL makes of the samples: padded ids, masks, advantages, old and reference log-probs, the normaliser."""
        return self._generate_and_score_completions([{"prompt": s.prompt.text} for s in self.samples])

    def losses(self, batch: dict) -> list[torch.Tensor]:
        """One loss a micro-batch, as `training_step` would see them in turn."""
        out, size = [], self.args.per_device_train_batch_size
        for start in range(0, len(self.samples), size):
            self.taken = slice(start, start + size)
            part = {k: v[self.taken] if v.ndim else v for k, v in batch.items()}
            out.append(self._compute_loss(self.model, part))
        return out


def make_samples(seed: int = 0, vocab: int = 100) -> list[Sample]:
    """Two groups of four completions, some cut; the first prompt is longer than the second, so that TRL pads on both sides."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(6, vocab, (n,), generator=g).tolist()  # noqa: E731
    prompts = [Prompt(0, "first", draw(7)), Prompt(1, "second", draw(3))]
    out = []
    for i, (n, stopped) in enumerate(zip(LENGTHS, STOPPED)):
        ids = draw(n - 1) + [EOS] if stopped else draw(n)
        out.append(Sample(prompts[i // G], i % G, ids, [0.0] * n, stopped, [0] * n))
    return out


def tables(seed: int) -> dict[str, torch.Tensor]:
    """Random log-probs [8, 12] float64: now, when sampled, of the reference. Wide enough that every clip and bound is met."""
    g = torch.Generator().manual_seed(seed)
    now = -3 * torch.rand(8, 12, generator=g, dtype=torch.float64)
    noise = torch.randn(2, 8, 12, generator=g, dtype=torch.float64)
    return {"now": now.requires_grad_(), "old": now.detach() + 0.5 * noise[0], "ref": now.detach() + 0.3 * noise[1]}


# ---- one case, by TRL's code and by ours ---------------------------------------------------------------------------------------


def give_rewards(samples: list[Sample], rewards: list[float | None], cfg: Config) -> torch.Tensor:
    """Fills rewards and advantages as the loop does; returns the standard deviations of `grpo.advantages`."""
    for sample, reward in zip(samples, rewards):
        sample.reward, sample.rewards = reward, {"given": reward}
    advantages, std = grpo.step_advantages([s.reward for s in samples], cfg)
    for sample, advantage in zip(samples, advantages):
        sample.advantage = advantage
    return std


def advantages_of_both(cfg: Config, rewards: list[float | None]) -> tuple[dict, dict]:
    """(ours, TRL's): "advantages" [8] float64, and the metrics of rewards under TRL's names."""
    samples = make_samples()
    peer = Peer(settings(cfg), samples, rewards, NoModel(), logp={})
    theirs = {"advantages": peer.batch()["advantages"]}
    std = give_rewards(samples, rewards, cfg)
    row = metrics.of_samples(metrics.facts(samples, SOLO), std)
    ours = {"advantages": torch.tensor([s.advantage for s in samples], dtype=torch.float64)}
    for name in ("reward", "reward_std", "frac_reward_zero_std", "rewards/given/mean", "rewards/given/std"):
        expected = peer._metrics["train"][name][0]
        theirs[name] = expected if expected == expected else 0.0  # TRL logs NaN where there is nothing to log, and we nothing
        ours[name] = row[name] if expected == expected else row.get(name, 0.0)
    return ours, theirs


def our_loss(samples: list[Sample], logp: dict[str, torch.Tensor], cfg: Config, off_policy: bool) -> tuple[ops.PolicyOut, list]:
    """Our loss of the same numbers, and the (row, column) of each of its tokens in TRL's tables."""
    n_tokens = packing.one_update(samples, cfg).n_tokens
    places = [(i, t) for i, s in enumerate(samples) if grpo.is_trained(s, cfg) for t in range(len(s.token_ids))]
    weight = [grpo.token_weight(len(samples[i].token_ids), len(samples), n_tokens, cfg) for i, _ in places]
    advantage = [samples[i].advantage for i, _ in places]
    index = tuple(torch.tensor(places).T)
    out = ops.policy_loss(
        logp["now"][index],
        logp["old"][index] if off_policy else None,
        torch.tensor(advantage, dtype=torch.float64),
        torch.tensor(weight, dtype=torch.float64),
        epsilon=cfg.epsilon,
        epsilon_high=cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high,
        delta=cfg.delta,
        ref_logp=logp["ref"][index] if cfg.beta else None,
        beta=cfg.beta,
        use_bias_correction_kl=cfg.use_bias_correction_kl,
    )
    return out, places


def losses_of_both(cfg: Config, off_policy: bool, seed: int) -> tuple[dict, dict]:
    """(ours, TRL's): "loss", its "gradient" with respect to the log-probs [8, 12] float64, and the metrics under TRL's names."""
    samples, logp, rewards = make_samples(), tables(seed), REWARDS["plain"]
    peer = Peer(settings(cfg, off_policy=off_policy), samples, rewards, NoModel(), NoModel(), logp)
    batch = peer.batch()
    assert ("old_per_token_logps" in batch) == off_policy  # TRL decides as we do
    give_rewards(samples, rewards, cfg)

    (loss,) = peer.losses(batch)
    if cfg.loss_type == "dapo" and off_policy:  # TRL counts the generation's tokens and expects half of them in this update
        loss = loss / 2
    theirs = {"loss": loss.item(), "gradient": torch.autograd.grad(loss, logp["now"])[0]}
    out, places = our_loss(samples, logp, cfg, off_policy)
    ours = {"loss": out.loss.item(), "gradient": torch.autograd.grad(out.loss, logp["now"])[0]}

    # The same numbers through the meter, under TRL's names.
    meter, index = metrics.Meter(), tuple(torch.tensor(places).T)
    entropy = logp["now"].detach().square()[index]
    meter.add(SimpleNamespace(sample=index[0], sampling_logp=out.logp), out._replace(entropy=entropy))
    meter.end_update(0.0)
    row = meter.summary(SOLO)
    names = [n for n in peer._metrics["train"] if n.startswith("clip_ratio/") or n in ("kl", "entropy")]
    assert len(names) == 6 + bool(cfg.beta)
    theirs |= {name: peer._metrics["train"][name][0] for name in names}
    ours |= {name: row[name] for name in names}
    return ours, theirs
