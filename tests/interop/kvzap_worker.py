"""Run by test_kvzap.py in kvpress's own environment: `kvzap_worker.py JOB.json RESULT.json`.

Stock kvpress alone: the artifact's folder is read by `KVzapModel`, whose scores `DMSPress` evicts by.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from kvpress import DMSPress, KVzapPress
from kvpress.presses.kvzap_press import KVzapModel
from transformers import AutoModelForCausalLM, DynamicCache


class FromFolder(KVzapPress):
    """The press with a model of ours: stock kvpress asks the Hub for one of the target's name."""

    def post_init_from_model(self, model: Any) -> None:
        if not hasattr(self, "kvzap_model"):
            self.kvzap_model = KVzapModel.from_pretrained(job["kvzap"])


class Noting(FromFolder):
    """Notes what it scores."""

    def score(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().score(module, *args, **kwargs)
        scores.setdefault(module.layer_idx, []).append(found)
        return found


@torch.no_grad()
def run(model: Any, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """Scores [layer][KV head] of all tokens, and [layer] what is masked after the prompt and at the end."""
    scores.clear()
    press = DMSPress(Noting(), threshold=job["threshold"], sliding_window_size=job["window"], decoding=True)
    cache, masked = DynamicCache(), []
    with press(model):
        for ids in ([prompt], *([[token]] for token in answer)):
            model(torch.tensor(ids), past_key_values=cache)
            masked.append([_masked(layer.self_attn) for layer in model.model.layers])
    joined = [torch.cat(scores[layer], -1)[0].tolist() for layer in range(len(model.model.layers))]
    return {"scores": joined, "masked": [masked[0], masked[-1]]}


def _masked(attention: Any) -> list[list[int]]:
    """(KV head, position) of every masked key."""
    if attention.masked_key_indices is None:
        return []
    _, heads, places = attention.masked_key_indices
    return sorted([int(head), int(place)] for head, place in zip(heads, places, strict=True))


job = json.loads(Path(sys.argv[1]).read_text())
scores: dict[int, list[Any]] = {}
torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained(
    job["model"], dtype=torch.float32, attn_implementation="sdpa"
).eval()
results = [run(target, *pair) for pair in job["texts"]]
Path(sys.argv[2]).write_text(json.dumps(results))
