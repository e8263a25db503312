"""Stock kvpress reads an exported module, gives the same scores, and evicts the same rows by a threshold.

The environment is that of test_kvpress.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import run
from test_kvpress import tiny

from longtrain.artifact.folder import Artifact
from longtrain.decoding.evict import Budget, Keep, PromptRun
from longtrain.decoding.prefill import prefill
from longtrain.methods.kvzap.config import Config
from longtrain.methods.kvzap.modules import KVzap
from longtrain.methods.kvzap.runtime import KVzapEvictor
from longtrain.targets.loading import target_from_model

WINDOW = 8
LENGTHS = ((61, 30), (40, 5), (6, 20))
"""Tokens of each prompt, and of what follows it."""


@pytest.mark.slow
@pytest.mark.parametrize("hidden_dim", [16, 0])
def test_scores_and_rows_of_stock_kvpress(tmp_path: Path, interpreter: Path, hidden_dim: int) -> None:
    torch.manual_seed(hidden_dim)
    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    target = target_from_model(model)
    config = Config(hidden_dim=hidden_dim, sinks=0, window=WINDOW)
    module = KVzap(config, target.info)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.normal_(0, 0.5)
    Artifact.from_module("kvzap", config, module=module, target=target).save(tmp_path / "made")
    gen = torch.Generator().manual_seed(1)
    texts = [[torch.randint(2, 4096, (n,), generator=gen).tolist() for n in pair] for pair in LENGTHS]
    threshold = 0.0
    job = {"model": tmp_path / "model", "kvzap": tmp_path / "made" / "kvpress", "texts": texts}
    job |= {"threshold": threshold, "window": WINDOW}
    (tmp_path / "job.json").write_text(json.dumps(job, default=str))
    worker = Path(__file__).with_name("kvzap_worker.py")
    run(interpreter, worker, tmp_path / "job.json", tmp_path / "result.json")
    theirs = json.loads((tmp_path / "result.json").read_text())

    parts = Artifact.load(tmp_path / "made").attach(target, budget_ratio=1.0, threshold=threshold)
    assert isinstance(parts.evictor, KVzapEvictor) and parts.evictor.budget == Budget(ratio=1.0)
    for (prompt, _), found in zip(texts, theirs, strict=True):
        spy = Spy(parts.evictor)
        prefill(target, target.new_cache, [prompt], max_new_tokens=1, nodes=1, evictor=spy)
        scores_LGS = torch.tensor([layer for layer in found["scores"]])[..., : len(prompt)]
        torch.testing.assert_close(spy.scores_LGS, scores_LGS, rtol=1e-4, atol=1e-4)
        gone = [
            sorted(
                [head, at]
                for head in range(target.info.n_kv_heads)
                for at in set(range(len(prompt))) - set(_row(spy.keep, layer, head))
            )
            for layer in range(target.info.n_layers)
        ]
        assert gone == found["masked"][0]
        assert len(prompt) <= WINDOW or any(gone)


class Spy:
    """An evictor that notes scores and kept rows."""

    def __init__(self, evictor: KVzapEvictor) -> None:
        self.evictor, self.keep, self.scores_LGS = evictor, None, torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.evictor, name)

    def select(self, run: PromptRun) -> Keep:
        self.keep, self.scores_LGS = self.evictor.select(run), self.evictor.scores(run)[:, 0]
        return self.keep


def _row(keep: Any, layer: int, head: int) -> list[int]:
    return keep.idx_LBGK[layer, 0, head, : int(keep.n_LBG[layer, 0, head])].tolist()
