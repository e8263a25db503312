"""Rings of positions for the tests of ring attention."""

import torch

W = 70
"""Positions of the ring: more than a program has."""


def case(nodes, level, heads=(4, 2), dim=24, dtype=torch.float32, device="cpu", seed=0, sinks=0):
    """q_BHTD, k_BGSD, v_BGSD, bounds and sees_BTN of the last `level` of `nodes` nodes of five sequences.

    Rings that are empty, that begin in the text, that are full, that went round.
    """
    rng = torch.Generator().manual_seed(seed)
    H, G = heads
    end = torch.tensor([0, 5, W, W + 9, 1000])
    since = torch.tensor([0, 2, 0, 9, 960])
    draw = lambda *shape: torch.randn(shape, generator=rng).to(device, dtype)  # noqa: E731
    q = draw(5, level, H, dim).transpose(1, 2)
    k, v = draw(5, G, sinks + W + nodes + 3, dim), draw(5, G, sinks + W + nodes + 3, dim)
    sees = torch.rand(5, nodes, nodes, generator=rng) < 0.5
    sees |= torch.eye(nodes, dtype=torch.bool)
    return q, k, v, (since.to(device), end.to(device)), sees[:, nodes - level :].to(device)
