"""Drafts copied from a text: the kernels, interpreted, beside torch."""

import pytest
import torch
from lookup_cases import rings

from longtrain.kernels import lookup


@pytest.mark.parametrize("ngram", [1, 2, 3, 5])
@pytest.mark.parametrize("slots", [32, 2048])
def test_what_is_copied_and_what_is_written(ngram, slots, monkeypatch):
    """Texts from one token to longer than their ring, of few tokens, so that places match often."""
    for seed in range(3):
        ring, last = rings(ngram, slots, seed)
        got, expected = ring.clone(), ring.clone()
        root = torch.arange(len(last)) % 3
        new = torch.randint(3, (6, len(last)), generator=torch.Generator().manual_seed(seed)).T
        n = torch.arange(len(last)) % 7
        found = lookup.extend(got, ngram, root, last, 6)
        lookup.put(got, ngram, new, last + 1, n)
        with monkeypatch.context() as patch:
            patch.setattr(lookup, "runs_on", lambda device: False)
            wanted = lookup.extend(expected, ngram, root, last, 6)
            lookup.put(expected, ngram, new, last + 1, n)
        assert torch.equal(found, wanted) and torch.equal(got, expected)
        assert torch.equal(found[:, 0], root) and (found[:, 1:] >= 0).all()
