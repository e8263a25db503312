import pytest
import torch

from longtrain.cache.base import Causal
from longtrain.cache.packed import PackedCapture
from longtrain.errors import ConflictError
from tests.kernels import plain_attention as reference


def rows(T=7):
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, T, 8, generator=rng, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, T, 8, generator=rng, dtype=torch.float64)
    return q, k, v


def test_documents_see_themselves_and_the_wanted_layer_is_kept():
    capture = PackedCapture((0, 3, 7), layers=(1,), device=torch.device("cpu"))
    q, k, v = rows()
    for layer in range(3):
        capture.write(layer, k + layer, v + layer)
        out, _ = capture.attend(layer, q, mask=Causal(), scale=0.3)
    visible = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).bool().tril()[None]
    expected, _ = reference.masked_attention(q, k + 2, v + 2, visible, scale=0.3)
    torch.testing.assert_close(out, expected)
    assert torch.equal(capture.kv[1][0], (k + 1)[0].transpose(0, 1))
    assert torch.equal(capture.kv[1][1], (v + 1)[0].transpose(0, 1))
    assert capture.bytes() == 2 * 7 * 2 * 8 * 8


def test_what_a_packed_row_cannot_do_is_refused():
    capture = PackedCapture((0, 7), layers=(), device=torch.device("cpu"))
    with pytest.raises(ConflictError, match="prefix"):
        capture.commit(None, torch.ones(1, dtype=torch.int64))
