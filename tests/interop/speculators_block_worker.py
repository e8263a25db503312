"""Run in an environment with speculators: its own block drafts' outputs for folders.

python speculators_block_worker.py JOB.json RESULT.safetensors
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core as dflash
from speculators.models.dspark import core as dspark

seen: dict[str, torch.Tensor] = {}


def metrics_of(module: Any) -> None:
    """Let a module's forward note what it gives to its loss, which is not computed."""

    def noting(logits: torch.Tensor, targets: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen["logits"] = logits[0]
        if module is dspark and args[0] is not None:
            seen["confidence"] = args[0][0]
        return torch.zeros(()), {}

    module.compute_metrics = noting


def main(job_path: str, result_path: str) -> None:
    with open(job_path) as stream:  # noqa: PTH123
        job = json.load(stream)
    torch.set_num_threads(1)
    metrics_of(dflash)
    metrics_of(dspark)
    results = {}
    for name, case in job["cases"].items():
        config = SpeculatorModelConfig.from_pretrained(case["folder"])
        config.transformer_layer_config._attn_implementation = "eager"
        model = SpeculatorModel.from_pretrained(case["folder"], config=config).float().eval()
        model.load_verifier_weights()
        inputs = load_file(case["inputs"])
        ids, anchors = inputs["ids"][None], inputs["anchors"]
        chosen = torch.zeros_like(ids)
        chosen[0, anchors] = 1
        hidden: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda _module, given, _out, into=hidden: into.append(given[0]))
        seen.clear()
        with torch.no_grad():
            model(
                hidden_states=inputs["states"][None],
                input_ids=ids,
                loss_mask=chosen,
                verifier_last_hidden_states=torch.zeros(1, ids.shape[1], inputs["width"].item()),
                document_ids=torch.zeros_like(ids),
                max_anchors=len(anchors),
            )
        seen["hidden"] = hidden[0][0]
        for what, part in seen.items():
            rows = part.unflatten(0, (len(anchors), -1))
            first = 0 if config.sample_from_anchor else 1
            results[f"{name}.{what}"] = rows[:, first:].contiguous()
    save_file(results, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
