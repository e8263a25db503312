"""Ring attention: the kernel, interpreted, beside plain torch."""

import pytest
import torch
from ring_cases import W, case

from longtrain.kernels import ring_attention as ring


@pytest.mark.corners
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("nodes", "level", "ahead", "sinks"), [(1, 1, 0, 0), (3, 1, 2, 4), (40, 35, 3, 0), (40, 35, 3, 7)]
)
def test_as_plain_torch(nodes, level, ahead, sinks, dtype, monkeypatch):
    q, k, v, bounds, sees = case(nodes, level, dtype=dtype, sinks=sinks)
    args = {"window": W, "ahead": ahead, "scale": 0.2, "sinks": sinks}
    got = ring.ring_attention(q, k, v, bounds, sees, **args)
    monkeypatch.setattr(ring, "kernels_serve", lambda x: False)
    expected = ring.ring_attention(q, k, v, bounds, sees, **args)
    close = 2e-3 if dtype == torch.float16 else 1e-5
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=close, atol=close)
