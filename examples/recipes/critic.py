"""A learned critic: the value of each token is the baseline, in place of the group's mean.

    δ_t = r_t + V(s_{t+1}) - V(s_t)         r_t is 0 before the last token; V is 0 after it
    A_t = Σ_l λ^l · δ_{t+l}                 GAE(λ), Schulman et al. 2015 (1506.02438), equation 16
    R_t = A_t + V(s_t)                      the target of the value
    L   = ½·mean max((V' - R)², (clip(V', V - c, V + c) - R)²)

The state s_t is the prompt and the tokens before token t, and rewards are not discounted (γ = 1).
V is the value before the first update of a step, and V' is the current value. L is the clipped
value loss of PPO (Schulman et al. 2017, 1707.06347). The loss of a step is the policy's loss with
A, plus `vf_coef`·L. A is first whitened over the tokens of the optimizer step on all ranks. The
mean of the group is not used. V begins at 0. With a small λ, early tokens get almost no credit, and
completions become short (VC-PPO, Yuan et al. 2025, 2503.01491). So the default of λ is 0.99.

V is one linear layer on the decoder's last hidden states, so no second model is needed. The values
need one more forward pass per step. The layer is trained, sharded and resumed like the model's own
weights, but it is neither exported nor sent to engines: `internal` excludes it
(nanogrpo/model/weights.py).

    python examples/recipes/critic.py --model runs/base --data arithmetic --output-dir runs/critic
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from nanogrpo.config import option
from nanogrpo.extras.options import Config
from nanogrpo.extras.recipe import main
from nanogrpo.feature import Feature
from nanogrpo.grpo import loss


@dataclass(frozen=True)
class Options(Config):
    lam: float = option(0.99, "λ of GAE; 1: the reward minus the value", ">= 0", "<= 1")
    vf_coef: float = option(0.1, "coefficient of the value loss", "> 0")
    cliprange_value: float = option(0.2, "how far the loss lets a value move in a step", "> 0")
    value_lr_factor: float = option(30.0, "factor of the value's learning rate", ">= 1")


class Critic(Feature):
    all_gradients = True  # a completion without an advantage trains the value, too

    def model(self, model, inputs):
        self.policy, self.factor = model, inputs.cfg.value_lr_factor
        self.features = inputs.features
        self.features.sort(key=lambda feature: feature is not self)  # see `objective`
        model.critic = torch.nn.Linear(model.cfg.hidden_size, 1, bias=False, device="meta")
        model.critic.internal = ("weight",)

    def loaded(self, model):
        if model is self.policy:  # a reference model has no critic
            torch.nn.init.zeros_(model.critic.weight)

    def values(self, hidden, lm_head):  # [M, D] → [M]
        # The value is factor·w·h, but its derivative with respect to w is h, as without the factor.
        # So `factor` multiplies the learning rate of the value, and changes nothing else.
        w = self.policy.critic.weight
        return (hidden @ (w + (self.factor - 1) * w.detach()).T).squeeze(-1).float()

    def advantages(self, rewards, by_function):
        self.rewards = rewards.flatten().tolist()  # of all ranks; NaN if there is none

    @torch.no_grad()
    def batches(self, run, batches):
        for batch in batches:
            values, found = run.model.forward_strip(batch, self.values), []  # [M]
            for i in batch.sample.unique_consecutive().tolist():
                found += gae(self.rewards[i], values[batch.sample == i].tolist(), run.cfg.lam)
            batch.advantage = values.new_tensor(found).nan_to_num()  # 0 without a reward
            batch.values, batch.returns = values, batch.advantage + values
        mine = torch.cat([batch.advantage.cpu() for batch in batches])
        std, mean = torch.std_mean(torch.cat(run.world.gather(mine)).double())
        for batch in batches:
            batch.advantage = ((batch.advantage - mean) / (std + 1e-8)).float()

    def objective(self, batch, cfg):
        """Add the value loss to the loss that the next feature, or the core, computes."""
        policy = loss.objective(batch, cfg, self.features[1:])

        def both(hidden, lm_head):
            out, values = policy(hidden, lm_head), self.values(hidden, lm_head)
            moved = (values - batch.values).clamp(-cfg.cliprange_value, cfg.cliprange_value)
            error, clipped = values - batch.returns, batch.values + moved - batch.returns
            errors = torch.maximum(error**2, clipped**2) / 2  # [M]
            total = out.loss + cfg.vf_coef * (batch.weight * errors).sum()
            return out._replace(loss=total, metrics=out.metrics | {"value_loss": errors.detach()})

        return both


def gae(reward, values, lam):
    """Return the advantage of each token of a completion."""
    deltas = [following - value for value, following in zip(values, [*values[1:], reward])]
    return [*accumulate(reversed(deltas), lambda later, delta: delta + lam * later)][::-1]


def features(cfg):
    return [Critic()]


if __name__ == "__main__":
    raise SystemExit(main(Options, features))
