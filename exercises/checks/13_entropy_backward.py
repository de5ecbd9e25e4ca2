"""Check exercise 13 against `log_softmax_backward_` in float64."""

import torch

from exercises.hints import by_hand, given, matches
from nanogrpo.kernels import reference

START = (
    "Begin with dH = 0: the gradient of log p_y is (1[j = y] - p_j) / T, which `scatter_` and"
    " softmax give. A factor for each row, [N], needs [:, None]."
)


def check(answer) -> None:
    g = torch.Generator().manual_seed(0)
    z, T = 2 * torch.randn(4, 6, generator=g, dtype=torch.float64), 0.7
    y = torch.tensor([0, 5, 2, 2])
    dlogp = torch.tensor([1.0, -0.5, 0.0, 2.0], dtype=torch.float64)
    dH = torch.tensor([0.0, 0.3, 1.0, -0.2], dtype=torch.float64)
    zero = torch.zeros_like(dH)
    logp_all = (z / T).log_softmax(-1)
    p, chosen = logp_all.exp(), torch.nn.functional.one_hot(y, 6).double()
    H = -(p * logp_all).sum(-1, keepdim=True)
    first = dlogp[:, None] * (chosen - p) / T

    def right(dlogp, dH):
        _, entropy, norm = reference.log_softmax_forward(z, y, T)
        return reference.log_softmax_backward_(z.clone(), y, T, norm, entropy, dlogp, dH)

    found = given(by_hand(answer.dlogits, z.clone(), y, dlogp, zero, T), "dlogits")
    mistakes = {
        "Divide by the temperature: dz = d(z/T)·T.": first * T,
        "The 1[j = y] is missing: the token's own logit must rise.": -dlogp[:, None] * p / T,
        "The sign of the log-prob's part is wrong.": -first,
        "The softmax must be that of z / T.": dlogp[:, None] * (chosen - z.softmax(-1)) / T,
    }
    matches("dlogits with dH = 0", found, right(dlogp, zero), mistakes)
    found = by_hand(answer.dlogits, z.clone(), y, dlogp, dH, T)
    mistakes = {
        "dH has no effect yet. Add the part of the entropy.": first,
        "The + H is missing in -p (log p + H). Without it, a row's gradient does not sum to 0.": (
            first - dH[:, None] * p * logp_all / T
        ),
        "There is a 1 in place of H. It drops out, because Σ_i dp_i/dz_j = 0; H remains.": (
            first - dH[:, None] * p * (logp_all + 1) / T
        ),
        "The sign of the entropy's part is wrong: dH/dz_j = -p_j (log p_j + H) / T.": (
            first + dH[:, None] * p * (logp_all + H) / T
        ),
        "The p is missing in -p (log p + H).": first - dH[:, None] * (logp_all + H) / T,
        "The entropy must be that of softmax(z / T).": (
            first
            - dH[:, None] * p * (logp_all + torch.special.entr(z.softmax(-1)).sum(-1, True)) / T
        ),
        "The entropy's part is not divided by the temperature.": (
            first - dH[:, None] * p * (logp_all + H)
        ),
    }
    matches("dlogits", found, right(dlogp, dH), mistakes)
