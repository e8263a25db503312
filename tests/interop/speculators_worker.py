"""Run in an environment with speculators: its own class's logits for folders, over steps of its own forward.

python speculators_worker.py JOB.json RESULT.safetensors
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel


def main(job_path: str, result_path: str) -> None:
    with open(job_path) as stream:  # noqa: PTH123
        job = json.load(stream)
    torch.set_num_threads(1)
    results = {}
    for name, case in job["cases"].items():
        model = SpeculatorModel.from_pretrained(case["folder"]).float().eval()
        inputs = load_file(case["inputs"])
        logits = []
        model.lm_head.register_forward_hook(lambda _module, _inputs, out, into=logits: into.append(out[0]))
        with torch.no_grad():
            model(
                hidden_states=inputs["states"][None],
                input_ids=inputs["ids"][None],
                document_ids=torch.zeros_like(inputs["ids"])[None],
                ttt_steps=job["depths"],
            )
        results[name] = torch.stack(logits).contiguous()
    save_file(results, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
