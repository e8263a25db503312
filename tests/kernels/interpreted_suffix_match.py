"""The longest match: the kernels, interpreted, beside torch."""

import pytest
import torch
from suffix_match_cases import texts_of

from longtrain.kernels import suffix_match
from longtrain.kernels.suffix_match import kernel, longest_match, write


@pytest.mark.corners
@pytest.mark.parametrize("places", [16, 1024], ids=["many blocks", "one block"])
@pytest.mark.parametrize("most", [1, 3, 62])
def test_the_matches_are_torchs(places, most, monkeypatch):
    """Positions are every second element of a tensor."""
    tokens_BC, last_B = texts_of(64)
    last_B = last_B.repeat_interleave(2)[::2]
    monkeypatch.setattr(kernel, "_PLACES", places)
    got = longest_match(tokens_BC, last_B, most, 5)
    monkeypatch.setattr(suffix_match, "runs_on", lambda device: False)
    expected = longest_match(tokens_BC, last_B, most, 5)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) and int(got[0].max()) == most


@pytest.mark.parametrize("cut", [False, True])
def test_what_is_written_is_torchs(cut, monkeypatch):
    """Every second of some tokens, positions and numbers; rings that are written round their ends."""
    tokens_BC, last_B = texts_of(64)
    new_BT = torch.arange(10 * len(last_B)).view(-1, 10)[:, ::2]
    first_B = (last_B + 1).repeat_interleave(2)[::2]
    n_B = (last_B % 6).repeat_interleave(2)[::2] if cut else None
    rings = [tokens_BC.clone() for _ in range(2)]
    write(rings[0], new_BT, first_B, n_B)
    monkeypatch.setattr(suffix_match, "runs_on", lambda device: False)
    write(rings[1], new_BT, first_B, n_B)
    assert torch.equal(*rings) and not torch.equal(rings[0], tokens_BC)
