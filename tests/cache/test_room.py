"""Memory is asked for before it is taken."""

import pytest
import torch

from longtrain.cache import room
from longtrain.cache.dense import DenseCache
from longtrain.errors import ConfigError

SIZES = {"n_layers": 2, "n_kv_heads": 3, "head_dim": 8, "batch": 4, "max_nodes": 6, "dtype": torch.bfloat16}


def test_a_plain_cache_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    bytes_of_a_token = 2 * 2 * 2 * 3 * 8 * 4
    monkeypatch.setattr(room, "free_bytes", lambda device: 100 * bytes_of_a_token)
    cache = DenseCache(**SIZES, max_tokens=94, device="cpu")
    assert cache.k_LBGSD.nbytes + cache.v_LBGSD.nbytes == 100 * bytes_of_a_token
    with pytest.raises(ConfigError, match=r"a KV cache for 4 sequences of 101 tokens .* about 100 tokens"):
        DenseCache(**SIZES, max_tokens=95, device="cpu")
    with pytest.raises(torch.OutOfMemoryError):
        DenseCache(**SIZES, max_tokens=95, device="cpu")


def test_where_nobody_knows_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(room, "free_bytes", lambda device: None)
    assert DenseCache(**SIZES, max_tokens=95, device="cpu").capacity == 101
    assert DenseCache(**SIZES, max_tokens=10**9, device="meta").capacity == 10**9 + 6


def test_what_is_free():
    free = room.free_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50
    assert room.free_bytes(torch.device("meta")) is None


@pytest.mark.gpu
def test_what_torch_keeps_counts_as_free_on_cuda():
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = room.free_bytes(device)
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    during = room.free_bytes(device)
    del held
    assert before - 2**29 < during <= before - 2**28 and room.free_bytes(device) > before - 2**26
    with pytest.raises(ConfigError, match="GiB are free on cuda"):
        DenseCache(**SIZES, max_tokens=10**10, device=device)
