"""The longest match: the kernel, interpreted, beside torch."""

import pytest
import torch
from suffix_match_cases import texts_of

from longtrain.kernels import suffix_match
from longtrain.kernels.suffix_match import kernel, longest_match


@pytest.mark.corners
@pytest.mark.parametrize("places", [16, 1024], ids=["many blocks", "one block"])
@pytest.mark.parametrize("most", [1, 3, 40])
def test_the_matches_are_torchs(places, most, monkeypatch):
    tokens_BC, last_B = texts_of(64)
    monkeypatch.setattr(kernel, "_PLACES", places)
    got = longest_match(tokens_BC, last_B, most)
    monkeypatch.setattr(suffix_match, "runs_on", lambda device: False)
    expected = longest_match(tokens_BC, last_B, most)
    assert torch.equal(torch.stack(got), torch.stack(expected)) and int(got[0].max()) == most
