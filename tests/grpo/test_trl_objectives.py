"""Invariant 12 beyond one loss: several rewards and RLOO, against TRL 1.16.0's code.

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
    make_samples,
    settings,
    tables,
)
from nanogrpo.extras.estimators import Estimators
from nanogrpo.grpo.advantages import step_advantages

# of TRL to transformers, not of ours
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


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
    rows = [[r] for r in REWARDS[kind]]
    ours, std = step_advantages(REWARDS[kind], cfg, rows, [Estimators(cfg)])
    torch.testing.assert_close(
        torch.tensor(ours, dtype=torch.float64), batch["advantages"], rtol=1e-9, atol=1e-12
    )
    zero = torch.isclose(std, torch.zeros_like(std)).float().mean().item()
    assert zero == pytest.approx(peer._metrics["train"]["frac_reward_zero_std"][0])
