"""TRL 1.16.0 as a peer: its own code for masks, advantages, losses and metrics, on samples, rewards and log-probs that are given.

    from trl_peer import Peer, config, make_samples, settings, tables
    peer = Peer(settings(cfg), samples, rewards, NoModel(), logp=tables(0));  batch = peer.batch();  (loss,) = peer.losses(batch)

`Peer` is a `GRPOTrainer` with the attributes its methods read, without the dataset and optimizer it never meets here.
Read next: test_trl_parity.py.
"""

from collections import defaultdict, deque
from types import SimpleNamespace

import torch
import trl
from accelerate import Accelerator

from nanogrpo.batch import Prompt, Sample
from nanogrpo.config import Config

EOS, PAD = 5, 0
G = 4  # completions a prompt
LENGTHS = [3, 9, 1, 6, 12, 2, 12, 7]  # of the completions of two prompts
SHARED = ("num_generations", "max_completion_length", "temperature", "loss_type", "scale_rewards", "epsilon", "epsilon_high")
SHARED += ("delta", "beta", "use_bias_correction_kl", "mask_truncated_completions", "num_iterations")  # options of both
STOPPED = [True, True, True, False, False, True, True, True]


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
