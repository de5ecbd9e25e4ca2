"""Invariant 12: advantages, losses, gradients and metrics equal those of TRL 1.16.0, computed by
TRL's own code.

`bench.trl_peer.Peer` is TRL's trainer without the parts it does not need here. Two halves:

* The maths alone, in float64, to 1e-6. Generation, rewards and the model's log-probs are given
  numbers. Masks, advantages, normalizers, loss and metrics are TRL's.
* The full model, in float32. Only generation and rewards are given. One side is transformers' Qwen3
  with TRL's padding and head, the other our decoder over packed strips, from one checkpoint folder.
  The gradients of all parameters are compared.

Read next: test_objectives.py.
"""

import copy

import pytest
import torch
import transformers
import trl
from trl.trainer.utils import add_fused_lm_head

from bench.trl_peer import (
    LENGTHS,
    LOSSES,
    OBJECTIVES,
    REWARDS,
    Peer,
    advantages_of_both,
    config,
    give_rewards,
    losses_of_both,
    make_samples,
    pairs,
    settings,
)
from nanogrpo.extras.options import CLIPPED
from nanogrpo.model import checkpoint
from tests.conftest import set_logp
from tests.grpo.alike import assert_trains_alike

# of TRL to transformers, not of ours
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_the_peer_is_the_version_we_promise():
    assert trl.__version__ == "1.16.0"


# ---- advantages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("kind", REWARDS)
def test_advantages_and_reward_metrics(kind, scale):
    ours, theirs = advantages_of_both(config(scale_rewards=scale), REWARDS[kind])
    # TRL's Bessel correction is a float32 quotient whatever its input, and of equal rewards its
    # rounded mean leaves 1e-17.
    torch.testing.assert_close(
        ours.pop("advantages"), theirs.pop("advantages"), rtol=1e-6, atol=1e-12
    )
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)


# ---- the loss and its gradient with respect to the log-probs -------------------------------------


PARTIAL = ("sequence", "off-policy mask", "highest entropy")


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask_truncated"])
@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize(("loss_type", "objective"), pairs())
def test_loss_gradient_and_metrics(loss_type, objective, off_policy, masked):
    cfg = config(loss_type=loss_type, mask_truncated_completions=masked, **OBJECTIVES[objective])
    ours, theirs = losses_of_both(cfg, off_policy, seed=len(objective))
    assert ours.pop("loss") == pytest.approx(theirs.pop("loss"), rel=1e-6, abs=1e-12)
    gradient = theirs.pop("gradient")
    torch.testing.assert_close(ours.pop("gradient"), gradient, rtol=1e-6, atol=1e-12)
    assert gradient.abs().max() > 0
    expected = theirs.pop("entropy gradient")
    torch.testing.assert_close(ours.pop("entropy gradient"), expected, rtol=1e-6, atol=1e-12)
    assert (expected.abs().max() > 0) == (cfg.entropy_coef > 0)
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-9)
    by_sequence = cfg.importance_sampling_level == "sequence" or loss_type == "vespo"
    own = 5 if loss_type in CLIPPED else loss_type != "sapo"
    own = 0 if masked and by_sequence else own
    assert len(ours) == 1 + own + bool(cfg.beta) + 2 * bool(cfg.entropy_coef)
    # the cases are not vacuous: each rule applies to some tokens, and not to others
    if off_policy and objective == "plain" and loss_type in CLIPPED:
        assert ours["clip_ratio/low_mean"] > 0 < ours["clip_ratio/high_mean"]
    if off_policy and objective in PARTIAL and loss_type in CLIPPED and not masked:
        assert gradient.count_nonzero() < sum(LENGTHS)
    if off_policy and loss_type == "cispo" and not masked:
        assert 0 < ours["cispo_clip_ratio"] < 1


# ---- the whole model -----------------------------------------------------------------------------


@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_gradient_of_every_parameter(tiny_base, loss_type, off_policy):
    """transformers' model, TRL's padded batch, head, old and reference log-probs, against our
    packed strips: one checkpoint.
    """
    options = {
        "epsilon": 0.02,
        "epsilon_high": 0.03,
        "beta": 0.1,
        "temperature": 0.7,
        "mask_truncated_completions": True,
    }
    cfg = config(loss_type=loss_type, token_budget=24, **options)
    samples = make_samples(vocab=100)
    args = settings(cfg, off_policy=off_policy)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_base, dtype=torch.float32, attn_implementation="eager"
    )
    mine = checkpoint.load_model(tiny_base)
    reference = copy.deepcopy(mine)
    their_reference = copy.deepcopy(theirs)
    for model, outputs in ((theirs, ("log_probs", "entropy")), (their_reference, ("log_probs",))):
        add_fused_lm_head(model, temperature=cfg.temperature, outputs=outputs)
    nudge = {
        n: 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3))
        for n, p in mine.named_parameters()
    }

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
    give_rewards(samples, REWARDS["plain"], cfg)
    if off_policy:
        set_logp(mine, samples, "old_logp", cfg)
    set_logp(reference, samples, "ref_logp", cfg)
    if off_policy:
        move(mine)
        move(theirs)

    (loss,) = peer.losses(batch)
    loss.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    outs = assert_trains_alike(mine, samples, cfg, loss, expected)
    assert len(outs) > 1
    kl = torch.cat([out.kl for out in outs]).mean().item()
    assert kl == pytest.approx(peer._metrics["train"]["kl"][0], rel=1e-4)
    clipped = any(out.metrics["clip"].any() for out in outs if "clip" in out.metrics)
    assert clipped == (off_policy and loss_type in CLIPPED)
