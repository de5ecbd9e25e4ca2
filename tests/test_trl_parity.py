"""Invariant 12: advantages, losses, gradients and metrics equal those of TRL 1.16.0, computed by TRL's own code.

`trl_peer.Peer` is TRL's trainer without what it never meets here. Two halves:

* the maths alone, in float64 to 1e-6: generation, rewards and the model's log-probs are given numbers, everything else (masks,
  advantages, normalisers, loss, metrics) is TRL's;
* the whole model, in float32: only generation and rewards are given. transformers' Qwen3, TRL's padding and head on one side, our
  decoder over packed strips on the other, from one checkpoint folder; the gradient of every parameter is compared.

Read next: test_grpo.py, where the same quantities are derived by hand.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from conftest import SOLO, assign_advantages, packed, set_logp
from trl.trainer.utils import add_fused_lm_head
from trl_peer import STOPPED, NoModel, Peer, config, make_samples, settings, tables

from nanogrpo import checkpoint, grpo, metrics, ops, packing
from nanogrpo.batch import Sample
from nanogrpo.config import Config

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL to transformers, not of ours


def test_the_peer_is_the_version_we_promise():
    assert trl.__version__ == "1.16.0"


# ---- advantages ----------------------------------------------------------------------------------------------------------------

REWARDS = {
    "plain": [1.0, 0.0, 0.25, 1.0, 0.5, 2.0, -1.0, 0.0],
    "equal": [0.1, 0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0],
    "some none": [None, 1.0, 0.0, None, 0.5, 0.25, None, 0.0],
    "one left": [None, None, 3.0, None, 0.5, 0.25, 1.0, 0.0],
    "a group of none": [None, None, None, None, 0.5, 0.25, 1.0, 0.0],
    "all none": [None] * 8,
    "all equal": [1.0] * 8,
}


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("kind", REWARDS)
def test_advantages_and_reward_metrics(kind, scale):
    samples = make_samples()
    cfg = config(scale_rewards=scale)
    peer = Peer(settings(cfg), samples, REWARDS[kind], NoModel(), logp={})
    theirs = peer.batch()["advantages"]
    for sample, reward in zip(samples, REWARDS[kind]):
        sample.reward, sample.rewards = reward, {"given": reward}
    std = assign_advantages(samples, cfg)
    ours = torch.tensor([s.advantage for s in samples], dtype=torch.float64)
    # TRL's Bessel correction is a float32 quotient whatever its input, and of equal rewards its rounded mean leaves 1e-17.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)
    row = metrics.of_samples(metrics.facts(samples, SOLO), std)
    for name in ("reward", "reward_std", "frac_reward_zero_std", "rewards/given/mean", "rewards/given/std"):
        expected = peer._metrics["train"][name][0]
        if expected == expected:  # TRL logs NaN where there is nothing to log, and we log nothing
            assert row[name] == pytest.approx(expected, rel=1e-6, abs=1e-12), name
        else:
            assert row.get(name, 0.0) == 0.0, name


# ---- the loss and its gradient with respect to the log-probs ------------------------------------------------------------------

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo"]
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


def ours(samples: list[Sample], logp: dict[str, torch.Tensor], cfg: Config, off_policy: bool) -> tuple[ops.PolicyOut, list]:
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


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask_truncated"])
@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_gradient_and_metrics(loss_type, objective, off_policy, masked):
    cfg = config(loss_type=loss_type, mask_truncated_completions=masked, **OBJECTIVES[objective])
    samples, logp = make_samples(), tables(seed=len(objective))
    rewards = REWARDS["plain"]
    peer = Peer(settings(cfg, off_policy=off_policy), samples, rewards, NoModel(), NoModel(), logp)
    batch = peer.batch()
    assert ("old_per_token_logps" in batch) == off_policy  # TRL decides as we do
    for sample, reward in zip(samples, rewards):
        sample.reward = reward
    assign_advantages(samples, cfg)

    (theirs,) = peer.losses(batch)
    if loss_type == "dapo" and off_policy:  # TRL counts the generation's tokens and expects half of them in this update
        theirs = theirs / 2
    (expected,) = torch.autograd.grad(theirs, logp["now"])
    out, places = ours(samples, logp, cfg, off_policy)
    (gradient,) = torch.autograd.grad(out.loss, logp["now"])
    assert out.loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)
    assert expected.abs().max() > 0

    # The same numbers through the meter, under TRL's names.
    meter = metrics.Meter()
    index = tuple(torch.tensor(places).T)
    entropy = logp["now"].detach().square()[index]
    taken = SimpleNamespace(sample=index[0], sampling_logp=out.logp)
    meter.add(taken, out._replace(entropy=entropy))
    meter.end_update(0.0)
    row = meter.summary(SOLO)
    names = [n for n in peer._metrics["train"] if n.startswith("clip_ratio/") or n in ("kl", "entropy")]
    assert len(names) == 6 + bool(cfg.beta)
    for name in names:
        assert row[name] == pytest.approx(peer._metrics["train"][name][0], rel=1e-5, abs=1e-9), name
    if off_policy and objective == "plain":
        assert row["clip_ratio/low_mean"] > 0 < row["clip_ratio/high_mean"]  # the case is not vacuous


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])  # bnpo depends on the split in TRL: that is its definition
def test_micro_batches_of_trl_add_up_to_our_loss(loss_type):
    cfg = config(loss_type=loss_type, beta=0.1, mask_truncated_completions=True)
    samples, logp = make_samples(), tables(seed=9)
    peer = Peer(settings(cfg, accumulation=4), samples, REWARDS["plain"], NoModel(), NoModel(), logp)
    theirs = sum(peer.losses(peer.batch()))
    (expected,) = torch.autograd.grad(theirs, logp["now"])
    for sample, reward in zip(samples, REWARDS["plain"]):
        sample.reward = reward
    assign_advantages(samples, cfg)
    out, _ = ours(samples, logp, cfg, off_policy=False)
    (gradient,) = torch.autograd.grad(out.loss, logp["now"])
    assert out.loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)


def test_a_length_cut_is_judged_alike():
    """TRL guesses from the last id, we are told: on these samples the two agree, in the lengths it logs too."""
    samples = make_samples()
    peer = Peer(settings(config(mask_truncated_completions=True)), samples, REWARDS["plain"], NoModel(), logp={})
    mask = peer.batch()["completion_mask"].bool().any(1)
    assert mask.tolist() == [grpo.is_trained(s, config(mask_truncated_completions=True)) for s in samples] == STOPPED


# ---- the whole model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_gradient_of_every_parameter(tiny_base, loss_type, off_policy):
    """transformers' model, TRL's padded batch, head, old and reference log-probs, against our packed strips: one checkpoint."""
    options = {"epsilon": 0.02, "epsilon_high": 0.03, "beta": 0.1, "temperature": 0.7, "mask_truncated_completions": True}
    cfg = config(loss_type=loss_type, token_budget=24, **options)
    samples = make_samples(vocab=100)
    args = settings(cfg, off_policy=off_policy)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32, attn_implementation="eager")
    mine = checkpoint.load_model(tiny_base)
    reference = copy.deepcopy(mine)
    their_reference = copy.deepcopy(theirs)
    for model, outputs in ((theirs, ("log_probs", "entropy")), (their_reference, ("log_probs",))):
        add_fused_lm_head(model, temperature=cfg.temperature, outputs=outputs)
    nudge = {n: 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for n, p in mine.named_parameters()}

    def move(model) -> None:
        """An update between sampling and training, the same on both sides."""
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(nudge[name])

    peer = Peer(args, samples, REWARDS["plain"], theirs.train(), their_reference)
    for model in (theirs, mine):
        move(model)  # away from the reference, so that the KL is not zero
    batch = peer.batch()
    assert ("old_per_token_logps" in batch) == off_policy
    for sample, reward in zip(samples, REWARDS["plain"]):
        sample.reward = reward
    assign_advantages(samples, cfg)
    if off_policy:
        set_logp(mine, samples, "old_logp", cfg)
    set_logp(reference, samples, "ref_logp", cfg)
    if off_policy:
        move(mine)
        move(theirs)

    (loss,) = peer.losses(batch)
    loss = loss / 2 if loss_type == "dapo" and off_policy else loss
    loss.backward()
    batches = packed(samples, cfg)
    assert len(batches) > 1
    total, clipped = 0.0, 0
    for strip in batches:
        out = mine.score(strip, grpo.objective(strip, cfg))
        out.loss.backward()
        total += out.loss.item()
        clipped += (out.clip != 0).sum().item()
    assert total == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert (clipped > 0) == off_policy
    expected = dict(theirs.named_parameters())
    scale = max(p.grad.abs().max() for p in expected.values()).item()
    for name, p in mine.named_parameters():
        torch.testing.assert_close(p.grad, expected[name].grad, rtol=1e-4, atol=2e-6 * scale, msg=lambda m, n=name: f"{n}: {m}")
