"""Invariant 12 beyond one loss: the adaptive entropy bonus over several updates, and several
rewards, against TRL 1.16.0's code.

Each loss type with each option is in test_trl_parity.py, whose helpers these are. Read next:
test_objectives.py.
"""

import pytest
import torch
import trl

from bench.trl_peer import (
    REWARDS,
    SEVERAL,
    NoModel,
    Peer,
    advantages_of_both,
    config,
    give_rewards,
    make_samples,
    our_batch,
    settings,
    tables,
)
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo.advantages import step_advantages
from nanogrpo.grpo.entropy import Bonus
from tests.conftest import SOLO

# of TRL to transformers, not of ours
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_every_clip_and_every_mask_is_met():
    """The cases above are not vacuous: in the tables that they draw, each rule applies to some
    tokens and not to others.
    """
    samples, logp = make_samples(), tables(seed=8)
    for options in (
        {"importance_sampling_level": "sequence", "epsilon": 0.05},
        {"loss_type": "cispo", "epsilon_high": 0.9},
        {"off_policy_mask_threshold": 0.01, "loss_type": "sapo"},
        {"top_entropy_quantile": 0.3},
    ):
        cfg = config(**options)
        give_rewards(samples, REWARDS["plain"], cfg)
        batch, index = our_batch(samples, logp, cfg, off_policy=True)
        leaf = logp["now"][index].detach().requires_grad_()
        out = grpo.loss(leaf, logp["entropy"][index].detach(), batch, cfg)
        (gradient,) = torch.autograd.grad(out.loss, leaf)
        if cfg.loss_type == "cispo":
            assert 0 < out.metrics["cispo_clip_ratio"].float().mean() < 1
        else:
            assert 0 < (gradient == 0).double().mean() < 1, options


def test_the_adaptive_coefficient_moves_as_theirs():
    """Six updates with entropies around the target: gate, coefficient and loss, step by step."""
    cfg = config(
        use_adaptive_entropy=True,
        entropy_coef=0.01,
        entropy_coef_max=0.014,
        entropy_target=0.5,
        loss_type="grpo",
    )
    samples, logp = make_samples(), tables(seed=0)
    peer = Peer(settings(cfg), samples, REWARDS["plain"], NoModel(), logp=logp)
    inputs = peer.batch()
    give_rewards(samples, REWARDS["plain"], cfg)
    bonus, met = Bonus(cfg, SOLO), set()
    for scale in (0.5, 0.6, 0.7, 2.0, 3.0, 3.0, 0.5):
        entropy = (logp["entropy"].detach() * scale).requires_grad_()
        peer.logp["entropy"] = entropy
        (theirs,) = peer.losses(inputs)
        expected = torch.autograd.grad(theirs, (logp["now"], entropy))
        batch, index = our_batch(samples, logp, cfg, off_policy=False)
        bonus = Bonus(cfg, SOLO, bonus.state)  # as after a restart: the state is all there is
        bonus.weigh([batch])
        out = grpo.loss(logp["now"][index], entropy[index], batch, cfg)
        for ours, peers in zip(torch.autograd.grad(out.loss, (logp["now"], entropy)), expected):
            torch.testing.assert_close(ours, peers, rtol=1e-6, atol=1e-12)
        bonus.add(batch, out)
        bonus.end_update()
        assert out.loss.item() == pytest.approx(theirs.item(), rel=1e-6)
        assert bonus.metrics()["entropy_coef"] == pytest.approx(
            peer._metrics["train"]["entropy_coef"][-1], rel=1e-12
        )
        assert bonus.state["last_entropy"] == pytest.approx(peer._last_world_entropy, rel=1e-6)
        met.add(bonus.state["entropy_coef"])
    assert 0.014 in met  # the bound, from below and back
    assert len(met) >= 4


# ---- advantages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(), (1.0, 0.25), (0.0, -2.0)])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("kind", SEVERAL)
def test_several_rewards(kind, aggregation, weights):
    ours, theirs = advantages_of_both(
        config(multi_objective_aggregation=aggregation, reward_weights=weights), SEVERAL[kind]
    )
    torch.testing.assert_close(
        ours.pop("advantages"), theirs.pop("advantages"), rtol=1e-6, atol=1e-9
    )
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("kind", REWARDS)
def test_leave_one_out_is_that_of_trls_rloo_trainer(kind):
    """Its own code, on our peer's samples and rewards; it generates and asks for log-probs under
    other signatures.
    """
    samples, cfg = make_samples(), config(advantage_estimator="rloo")
    peer = Peer(settings(cfg), samples, REWARDS[kind], NoModel(), logp=tables(0))
    peer.reward_clip_range, peer.normalize_advantages = None, False
    peer._generate = lambda prompts: (
        [s.prompt.token_ids for s in samples],
        [s.token_ids for s in samples],
        prompts,
    )
    peer._get_per_token_logps_and_entropies = lambda *_, **__: (peer.logp["old"], None, None)
    batch = trl.RLOOTrainer._generate_and_score_completions(
        peer, [{"prompt": s.prompt.text} for s in samples]
    )
    ours, std = step_advantages(REWARDS[kind], cfg)
    torch.testing.assert_close(
        torch.tensor(ours, dtype=torch.float64), batch["advantages"], rtol=1e-9, atol=1e-12
    )
    zero = torch.isclose(std, torch.zeros_like(std)).float().mean().item()
    assert zero == pytest.approx(peer._metrics["train"]["frac_reward_zero_std"][0])
