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
from longtrain.methods.kvzap.modules import KVzap, PredictedScores
from longtrain.methods.kvzap.runtime import KVzapEvictor
from longtrain.targets.model import Target
from longtrain.targets.step import TokenBatch
from tests.helpers import target_from_model
from tests.methods.kvzap.held_back import decoded, positions

THRESHOLD, WINDOW = 0.0, 8
LENGTHS = ((61, 30), (40, 5), (6, 20))
"""Tokens of each prompt, and of what follows it."""


def made(folder: Path, hidden_dim: int) -> tuple[Target, KVzap, list[list[list[int]]]]:
    """A target, an artifact with random weights, and texts: (prompt, what follows) each."""
    torch.manual_seed(hidden_dim)
    model = tiny("llama")
    model.save_pretrained(folder / "model")
    target = target_from_model(model)
    config = Config(hidden_dim=hidden_dim, sinks=0, window=WINDOW)
    module = KVzap(config, target.info)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.normal_(0, 0.5)
    Artifact.from_module("kvzap", config, module=module, target=target).save(folder / "made")
    gen = torch.Generator().manual_seed(1)
    texts = [[torch.randint(2, 4096, (n,), generator=gen).tolist() for n in pair] for pair in LENGTHS]
    for prompt, _ in texts:
        prompt[0] = _well_scored(target, module)
    return target, module, texts


@torch.no_grad()
def _well_scored(target: Target, module: KVzap) -> int:
    """A first token that nobody evicts: its scores are above the threshold in every layer and head."""
    hook, ids_BT = PredictedScores(module), torch.arange(2, 2000)[:, None]
    target.forward(
        TokenBatch(torch.zeros_like(ids_BT), ids_BT), target.new_cache(len(ids_BT), 1, 0), hook=hook
    )
    lowest_B = torch.stack(hook.scores).amin((0, 2, 3))
    assert lowest_B.max() > THRESHOLD + 0.1
    return 2 + int(lowest_B.argmax())


def of_kvpress(folder: Path, interpreter: Path, texts: list[list[list[int]]]) -> list[dict[str, Any]]:
    """Scores of all tokens, and what is masked after the prompt and at the end, of each text."""
    job = {"model": folder / "model", "kvzap": folder / "made" / "kvpress", "texts": texts}
    job |= {"threshold": THRESHOLD, "window": WINDOW}
    (folder / "job.json").write_text(json.dumps(job, default=str))
    worker = Path(__file__).with_name("kvzap_worker.py")
    run(interpreter, worker, folder / "job.json", folder / "result.json")
    found: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())
    return found


class Spy:
    """An evictor that notes scores and kept rows."""

    def __init__(self, evictor: KVzapEvictor) -> None:
        self.evictor, self.keep, self.scores_LGS = evictor, None, torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.evictor, name)

    def select(self, run: PromptRun) -> Keep:
        self.keep, self.scores_LGS = self.evictor.select(run), self.evictor.scores(run)[:, 0]
        return self.keep


def missing(heads: list[list[int]], tokens: int) -> list[list[int]]:
    """(KV head, position) of every row of a layer that is not held."""
    return sorted([head, at] for head, rows in enumerate(heads) for at in {*range(tokens)} - {*rows})


@pytest.mark.slow
@pytest.mark.parametrize("hidden_dim", [16, 0])
def test_scores_and_rows_of_stock_kvpress(tmp_path: Path, interpreter: Path, hidden_dim: int) -> None:
    target, _, texts = made(tmp_path, hidden_dim)
    theirs = of_kvpress(tmp_path, interpreter, texts)
    parts = Artifact.load(tmp_path / "made").attach(target, budget_ratio=1.0, threshold=THRESHOLD)
    assert isinstance(parts.evictor, KVzapEvictor) and parts.evictor.budget == Budget(ratio=1.0)
    for (prompt, _), found in zip(texts, theirs, strict=True):
        spy = Spy(parts.evictor)
        prefill(target, target.new_cache, [prompt], max_new_tokens=1, nodes=1, evictor=spy)
        scores_LGS = torch.tensor([layer for layer in found["scores"]])[..., : len(prompt)]
        torch.testing.assert_close(spy.scores_LGS, scores_LGS, rtol=1e-4, atol=1e-4)
        kept = [
            [idx[: int(n)].tolist() for idx, n in zip(idx_GK, n_G, strict=True)]
            for idx_GK, n_G in zip(spy.keep.idx_LBGK[:, 0], spy.keep.n_LBG[:, 0], strict=True)
        ]
        gone = [missing(heads, len(prompt)) for heads in kept]
        assert gone == found["masked"][0]
        assert len(prompt) <= WINDOW or any(gone)


@pytest.mark.slow
def test_rows_of_stock_kvpress_while_decoding(tmp_path: Path, interpreter: Path) -> None:
    """With a stride of one; the first row, which always stays here, has a score that keeps it there too."""
    target, module, texts = made(tmp_path, 16)
    theirs = of_kvpress(tmp_path, interpreter, texts)
    evictor = KVzapEvictor(
        module,
        Config(hidden_dim=16, sinks=0),
        Budget(ratio=1.0),
        window=WINDOW,
        threshold=THRESHOLD,
        decoding=True,
        stride=1,
    )
    for (prompt, answer), found in zip(texts, theirs, strict=True):
        cache, k_LBGND, s_LBGN = decoded(target, evictor, [prompt], [answer])
        torch.testing.assert_close(s_LBGN[:, 0], torch.tensor(found["scores"]), rtol=1e-3, atol=1e-3)
        held = positions(cache, k_LBGND, 0)
        held = positions(cache, k_LBGND, 0)
        gone = [missing(heads, len(prompt) + len(answer)) for heads in held]
        assert gone == found["masked"][1]
        assert any(gone)
