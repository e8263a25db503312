"""Texts in rings for the tests of drafts that are copied."""

import torch

from longtrain.kernels import lookup


def rings(ngram, slots, seed, vocab=3):
    """Rings of texts of several lengths, and where the next token of each comes: ring_BX, last_B."""
    last = torch.tensor([0, 1, 2, 17, slots - 1, slots, 2 * slots + 5])
    ring = torch.full((len(last), ngram - 1 + slots), lookup.NONE, dtype=torch.int32)
    coins = torch.Generator().manual_seed(seed)
    for b, n in enumerate(last.tolist()):
        at = torch.arange(max(0, n - slots), n) % slots + ngram - 1
        ring[b, at] = torch.randint(vocab, (len(at),), generator=coins, dtype=torch.int32)
    return ring, last
