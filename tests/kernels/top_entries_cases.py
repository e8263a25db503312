"""Scores whose choice is easy to get wrong."""

import torch

K, SINKS, WINDOW = 20, 3, 5
KINDS = ("normal", "few values", "equal", "infinite", "nan", "close")


def scores_of(kind, *shape, seed=0):
    """fp32 scores of a kind."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(*shape, generator=rng)
    if kind == "few values":
        scores = torch.randint(-2, 3, shape, generator=rng).float() * torch.tensor(0.0).neg().exp()
        scores[scores == 0] *= -1  # both zeros
        scores[..., ::3] = scores[..., ::3].abs()
    elif kind == "equal":
        scores.fill_(-7.25)
    elif kind == "infinite":
        scores[torch.rand(shape, generator=rng) < 0.9] = -torch.inf
        scores[torch.rand(shape, generator=rng) < 0.01] = torch.inf
    elif kind == "nan":
        scores[torch.rand(shape, generator=rng) < 0.7] = torch.nan
    elif kind == "close":  # they differ in the last bits alone
        scores = (torch.full(shape, 0x41234500) + torch.randint(0, 300, shape, generator=rng)).int()
        scores = scores.view(torch.float32)
    return scores
