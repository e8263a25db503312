"""The proposer for vLLM where no vLLM is needed: what it refuses, and how it reads a cache of a CPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from longtrain.integrations.longspec_vllm import LongSpecProposer, _attend, _of_cpu


def settings(folder, *, tensor_parallel=1, drafted=4):
    return SimpleNamespace(
        additional_config={"longspec": str(folder)} if folder else {},
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel, pipeline_parallel_size=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafted),
        model_config=SimpleNamespace(max_model_len=64),
    )


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="no 'longspec'; pass the folder"):
        LongSpecProposer(settings(None))
    manifest = {"method": "eagle3", "config": {"window": 3}, "target": {}}
    (tmp_path / "longtrain.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="method 'eagle3', not 'longspec'"):
        LongSpecProposer(settings(tmp_path))
    partly = {**manifest, "method": "longspec", "target": {"rope": {"partial_rotary_factor": 0.5}}}
    (tmp_path / "longtrain.json").write_text(json.dumps(partly))
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5"):
        LongSpecProposer(settings(tmp_path))
    (tmp_path / "longtrain.json").write_text(json.dumps({**manifest, "method": "longspec"}))
    with pytest.raises(ValueError, match="no tensor or pipeline"):
        LongSpecProposer(settings(tmp_path, tensor_parallel=2))
    with pytest.raises(ValueError, match="num_speculative_tokens=4; the draft's window is 3"):
        LongSpecProposer(settings(tmp_path))


def test_blocks_of_a_cpu_hold_keys_by_channel():
    keys, values = torch.randn(2, 3, 16, 8), torch.randn(2, 3, 16, 8)
    packed = torch.cat((keys.transpose(-1, -2).flatten(2), values.flatten(2)), -1).view(2, 3, 16, 16)
    found = _of_cpu(packed, 8)
    assert torch.equal(found[0], keys) and torch.equal(found[1], values)


def test_a_request_of_one_token_reads_nothing():
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    out = _attend(q, k, v, torch.tensor([[False] * 5, [True, True, False, False, False]]))
    assert not out[0].any()
    share = (k[1, 1, :2] @ q[1, 3, 0] * 8**-0.5).softmax(0)
    torch.testing.assert_close(out[1, 3, 0], share @ v[1, 1, :2])
