"""Trees to grow with `kernels.beam`, for the tests of its kernels."""

import torch

from longtrain.kernels.beam import ExpandingTree, best_continuations

WIDTHS = (2, 5, 3)


def beam_case(renamed):
    """Logits of each level of two trees, what tokens are called (None: their own numbers), and the roots."""
    rng = torch.Generator().manual_seed(3)
    logits = [torch.randn(2, above, 40, generator=rng) * 3 for above in (1, *WIDTHS[:-1])]
    return logits, 100 + torch.randperm(40, generator=rng) if renamed else None, torch.tensor([96, 5])


def grown(root, logits, ids, beyond=0):
    """A tree of `WIDTHS`, and its last level's scores; each level looks for `beyond` more continuations."""
    tree = ExpandingTree.of(root, 1 + sum(WIDTHS))
    score, above, last = torch.zeros(2, 1, device=root.device), 0, 1
    for width, of_level in zip(WIDTHS, logits, strict=True):
        _, _, score = best_continuations(
            of_level, score, width + beyond, 1.0, ids_V=ids, tree=tree, above=above, nodes=width
        )
        score = score[:, :width]
        above, last = last, last + width
    return tree, score
