"""Trees and logits for the tests of greedy choices."""

import torch


def trees(batch, nodes, vocab, seed):
    """Random trees of few tokens, so that children match often: best_BN, tokens_BN, parents_BN, depth."""
    rng = torch.Generator().manual_seed(seed)
    parents = torch.full((batch, nodes), -1, dtype=torch.int64)
    depth = torch.zeros(batch, nodes, dtype=torch.int64)
    for i in range(1, nodes):
        parents[:, i] = torch.randint(0, i, (batch,), generator=rng)
        depth[:, i] = depth.gather(1, parents[:, i, None])[:, 0] + 1
    tokens, best = (torch.randint(0, vocab, (batch, nodes), generator=rng) for _ in range(2))
    return best, tokens, parents, int(depth.max())
