"""Check exercise 5 against the log-probs of `log_softmax_forward`, and name the bugs that
remain."""

import itertools

import torch

from exercises.hints import matches
from nanogrpo.kernels import reference

START = "After a shift, logits, tokens and mask all have T - 1 places."
BUGS = {
    "temperature": "log_softmax(z) / T is no log-prob: its exponentials do not sum to 1.",
    "shift": "logits[b, t] predicts tokens[b, t + 1], but is compared with tokens[b, t]. The mask"
    " belongs to the predicted tokens.",
    "mean": "The mean runs over all B·T places. Divide by the number of completion tokens instead.",
}


def variant(logits, tokens, is_completion, advantage, temperature, bugs):
    """Return the loss with some of the bugs."""
    logits = logits if "temperature" in bugs else logits / temperature
    logp_all = logits.log_softmax(-1)
    if "temperature" in bugs:
        logp_all = logp_all / temperature
    if "shift" not in bugs:
        logp_all, tokens, is_completion = logp_all[:, :-1], tokens[:, 1:], is_completion[:, 1:]
    logp = logp_all.gather(2, tokens[..., None])[..., 0]
    l = -advantage[:, None] * logp * is_completion
    return l.mean() if "mean" in bugs else l.sum() / is_completion.sum()


def check(answer) -> None:
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2, 7, 5, generator=g, dtype=torch.float64)
    tokens = torch.randint(5, (2, 7), generator=g)
    is_completion = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1]]).bool()
    advantage = torch.tensor([1.0, -0.4], dtype=torch.float64)
    batch = logits, tokens, is_completion, advantage, 0.7

    b, t = is_completion.nonzero(as_tuple=True)
    logp, _, _ = reference.log_softmax_forward(logits[b, t - 1], tokens[b, t], 0.7)
    right = -(advantage[b] * logp).mean()
    mistakes = {}
    for count in (1, 2, 3):
        for bugs in itertools.combinations(BUGS, count):
            corrected = " and the ".join(name for name in BUGS if name not in bugs)
            found = f"Corrected so far: the {corrected}. " if corrected else "Three bugs remain. "
            mistakes[found + BUGS[bugs[0]]] = variant(*batch, bugs)
    half = variant(*batch[:2], is_completion.roll(-1, 1), *batch[3:], ["shift"])
    mistakes["You have shifted the mask, but not the tokens."] = half
    # the mask [:, :-1], divided by its own sum, or by that of the full mask
    rolled = is_completion.roll(1, 1)
    own = variant(logits, tokens, rolled, advantage, 0.7, [])
    by_all = own * rolled[:, 1:].sum() / is_completion.sum()
    hint = "The logits and tokens are shifted, but the mask is not: use is_completion[:, 1:]."
    mistakes |= {hint: own, f"{hint} It is that of the predicted tokens.": by_all}
    matches("loss", answer.loss(*batch), right, mistakes)
