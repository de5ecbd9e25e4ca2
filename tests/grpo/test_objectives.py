"""The menu: the gradient of DPPO by hand, tokens that no objective may see, and the indifference of
all objectives to splits.

test_trl_parity.py holds the same to TRL's code, but for DPPO, which TRL has not. Read next:
test_entropy.py, test_train_menu.py.
"""

from types import SimpleNamespace

import pytest
import torch

from nanogrpo import Config
from nanogrpo.extras import objectives
from nanogrpo.extras import options as options_of
from nanogrpo.extras.entropy import prepare
from nanogrpo.extras.options import CHOICES
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import head as ops
from nanogrpo.model.decoder import Decoder
from tests.conftest import SOLO, packed, random_samples, tiny_model

LENGTHS = [3, 1, 6, 4]


def strip(seed: int = 0) -> tuple[torch.Tensor, SimpleNamespace]:
    """Log-probs [14] float64 that carry a gradient, and their batch: ratios far from 1, advantages
    of both signs.
    """
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    M = sum(LENGTHS)
    logp = -2.5 * torch.rand(M, generator=g, dtype=torch.float64) - 0.05
    sample = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    batch = SimpleNamespace(
        sample=sample,
        advantage=torch.tensor([1.5, -0.7, -1.1, 0.4], dtype=torch.float64)[sample],
        weight=0.1 + torch.rand(M, generator=g, dtype=torch.float64),
        old_logp=logp + 0.5 * draw(M),
        ref_logp=None,
        sampling_logp=(logp + 0.5 * draw(M)).clamp(max=-0.01),
        importance=None,
        entropy_weight=None,
    )
    return logp.requires_grad_(), batch


def gradient(cfg: Config, logp: torch.Tensor, batch: SimpleNamespace) -> torch.Tensor:
    return torch.autograd.grad(
        objectives.loss(logp, torch.zeros_like(logp), batch, cfg).loss, logp
    )[0]


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_the_gradient_of_dppo_by_hand(kind):
    """TRL has all the other objectives: test_trl_parity.py."""
    penalty, limit = {"tv": (1e-3, 0.1), "kl": (0.0, 0.02)}[kind]
    constants = {"loss_kwargs": {"dppo_penalty": penalty}, "epsilon": limit}
    cfg, zeros = Config(loss_type=f"dppo_{kind}", **constants), 0
    assert grpo.token_weight(3, 2, 10, cfg) == 1 / 10
    assert grpo.token_weight(0, 3, 0, cfg) > 0  # nothing divides by zero
    for seed in range(5):
        logp, batch = strip(seed)
        p, mu, a = logp.detach().exp(), batch.sampling_logp.exp(), batch.advantage
        moved = (p - mu).abs()
        if kind == "kl":
            moved = mu * (mu / p).log() + (1 - mu) * ((1 - mu) / (1 - p)).log()
        stopped = (moved > limit) & (((a > 0) & (p > mu)) | ((a < 0) & (p < mu)))
        log_w = logp.detach() - batch.old_logp
        expected = torch.where(stopped, 0.0, -log_w.exp() * a) + 2 * penalty * log_w
        ours = gradient(cfg, logp, batch)
        torch.testing.assert_close(ours, batch.weight * expected, rtol=1e-6, atol=1e-12)
        zeros += int(stopped.sum())
    assert zeros > 0


def test_the_off_policy_mask_takes_out_whole_bad_completions():
    logp, batch = strip()
    gaps = (batch.sampling_logp - logp.detach()).split(LENGTHS)
    gap = torch.cat([x.mean().expand(len(x)) for x in gaps])
    for threshold in (0.0, 0.1, 0.3, 10.0):
        ours = gradient(Config(loss_type="sapo", off_policy_mask_threshold=threshold), logp, batch)
        assert ((ours == 0) == ((batch.advantage < 0) & (gap > threshold))).all()
    # an engine that gave no log-probs: no evidence
    batch.sampling_logp = torch.full_like(batch.sampling_logp, torch.nan)
    cfg = Config(off_policy_mask_threshold=0.0, loss_type="sapo")
    assert (gradient(cfg, logp, batch) != 0).all()


@pytest.mark.parametrize("loss_type", CHOICES["loss_type"])
def test_nothing_of_an_untrained_token_is_seen(loss_type):
    """A tool's output has weight 0, and no log-probs: nan in it changes no bit of the rest, nor of
    its sequence's ratio.
    """
    level = "token" if loss_type.startswith("dppo") else "sequence"
    cfg = Config(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.1,
        off_policy_mask_threshold=0.2,
    )
    logp, batch = strip()
    batch.ref_logp, out = batch.sampling_logp + 0.1, torch.tensor([1, 5, 6])
    batch.weight[out] = 0.0
    clean = gradient(cfg, logp, batch)
    assert (clean[out] == 0).all()
    for vector in (batch.old_logp, batch.ref_logp, batch.sampling_logp):
        vector[out] = torch.nan
    broken = logp.detach().clone()
    broken[out] = torch.nan
    assert torch.equal(gradient(cfg, broken.requires_grad_(), batch), clean)


def test_an_objective_of_far_too_large_ratios_is_finite():
    for loss_type in CHOICES["loss_type"]:
        logp, batch = strip()
        batch.old_logp = logp.detach() - torch.linspace(-400, 400, len(logp), dtype=torch.float64)
        ours = gradient(Config(loss_type=loss_type, beta=0.0), logp, batch)
        assert ours.isfinite().all(), loss_type


# ---- through the head: fused or in two phases, whole or split ------------------------------------

MENU = {  # every path through the head, with every vector that is of the whole step
    **{name: {"loss_type": name} for name in CHOICES["loss_type"]},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo, kl": {"importance_sampling_level": "sequence", "beta": 0.1},
    "truncated left out": {"mask_truncated_completions": True, "beta": 0.1},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    # not 0.4, whose threshold is a tie: the first tokens of a group have the same entropy
    "top entropy": {"top_entropy_quantile": 0.45},
    "entropy bonus": {"entropy_coef": 0.3},
    "entropy bonus of the top": {
        "entropy_coef": 0.3,
        "top_entropy_quantile": 0.45,
        "loss_type": "cispo",
        "epsilon_high": 2.0,
    },
    "sapo and everything": {
        "loss_type": "sapo",
        "entropy_coef": 0.3,
        "top_entropy_quantile": 0.6,
        "beta": 0.1,
    },
}


def gradient_of(
    model: Decoder, options: dict, budget: int = 10**6, all_gradients: bool = True
) -> torch.Tensor:
    """Of one optimizer step, flat, after its loss. Half of the completions have no advantage."""
    samples = random_samples(group=4)
    for sample in samples[::2]:
        sample.advantage = 0.0
    cfg = Config(
        **{"num_generations": 4, "token_budget": budget, "max_completion_length": 20, **options}
    )
    batches, entropies = packed(samples, cfg, all_gradients), []
    for batch in batches:
        batch.ref_logp = batch.ref_logp if cfg.beta else None
        with torch.no_grad():
            entropies.append(model.forward_strip(batch, grpo.logp_of(batch, cfg))[1])
    prepare(batches, entropies, cfg, SOLO)
    model.zero_grad(set_to_none=True)
    total = torch.zeros(1)
    for batch in batches:
        out = model.forward_strip(batch, grpo.objective(batch, cfg, [objectives.Objectives(cfg)]))
        out.loss.backward()
        total += out.loss.detach()
    return torch.cat([total, *(p.grad.flatten() for p in model.parameters())])


SEQUENCE = {"importance_sampling_level": "sequence"}
NOTES = {
    "cispo": ({"loss_type": "cispo"}, "its paper has 5"),
    "cispo as published": ({"loss_type": "cispo", "epsilon_high": 5.0}, None),
    "gspo": (SEQUENCE, "paper has 3e-4"),
    "gspo as published": ({**SEQUENCE, "epsilon": 3e-4, "epsilon_high": 4e-4}, None),
    "luspo": ({"loss_type": "luspo", "epsilon": 2e-3}, "its paper has --importance-sampling-level"),
    "luspo as published": ({"loss_type": "luspo", **SEQUENCE, "epsilon": 2e-3}, None),
    "top": ({**SEQUENCE, "epsilon": 3e-4, "top_entropy_quantile": 0.2}, "all tokens of a"),
    "plain": ({}, None),
}


@pytest.mark.parametrize("name", NOTES)
def test_a_run_says_once_where_trls_defaults_are_not_those_of_a_paper(name, caplog):
    options, words = NOTES[name]
    with caplog.at_level("INFO", "nanogrpo"):
        objectives.Objectives(Config(**options))
    assert [words in text for text in caplog.messages] == ([True] if words else [])


@pytest.mark.parametrize("name", MENU)
def test_any_micro_batches_have_the_same_gradient(name):
    """Also if completions without an advantage are left out."""
    model = tiny_model().double()
    every = bool(MENU[name].keys() & {"entropy_coef", "top_entropy_quantile"})
    whole = gradient_of(model, MENU[name])
    assert whole.norm() > 0
    for budget in (1, 40):
        split = gradient_of(model, {**MENU[name], "share_prompts": budget > 1}, budget, every)
        assert (split - whole).norm() <= 1e-7 * whole.norm()  # weights are float32


@pytest.mark.parametrize(
    "options", [{}, {"delta": 1.5, "beta": 0.2}, {"entropy_coef": 0.3, "top_entropy_quantile": 0.4}]
)
def test_the_fused_head_and_two_phases_agree(options, monkeypatch):
    model, options = tiny_model(), {"epsilon": 0.1, **options}
    fused = gradient_of(model, options)
    monkeypatch.delattr(ops, "head_policy_loss")
    monkeypatch.setattr(options_of, "CLIPPED", ())  # as if the kernel had none of them
    two_phases = gradient_of(model, options)
    assert (fused - two_phases).norm() <= 2e-6 * fused.norm()
