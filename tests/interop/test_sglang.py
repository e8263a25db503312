"""SGLang's own factory, coordinator and adaptor with the class of an exported folder: which rows are read.

What is not run: SGLang's server, its attention kernels and CUDA graphs, which need a GPU; and no attention
backend of this release calls the coordinator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import Environment, run

from longtrain.targets.loading import random_target
from tests.methods.specontext.test_sglang_export import HEADS, KEYS, NEW, decoded, exported, prompts_of

pytestmark = pytest.mark.slow
SGLANG = "0.5.23"
LEAST = 20
"""Prompts of fewer tokens are read whole (`min_sparse_prompt_len`)."""


@pytest.fixture(scope="session")
def python() -> Path:
    """A Python beside SGLang's files; what SGLang needs is left out."""
    needs = (f"torch=={torch.__version__.split('+')[0]}", "numpy", "safetensors")
    return Environment("sglang", needs, alone=(f"sglang=={SGLANG}",)).python()


def read_by_sglang(
    python: Path, folder: Path, texts: list[list[int]], page: int, layers: int
) -> list[list[list[list[int]]]]:
    """Positions that attention reads: [step][request][layer]."""
    settings = {"algorithm": "specontext", "backend": "fa3", "page_size": page}
    settings |= {"top_k": KEYS["budget_tokens"], "min_sparse_prompt_len": LEAST}
    settings |= {"sinks": KEYS["sinks"], "window": KEYS["window"]}
    root = Path(__file__).parents[1]
    job: dict[str, Any] = {"head": str(folder), "served": str(root / "methods" / "specontext")}
    job |= {"config": json.dumps(settings), "texts": texts, "prompts": [len(p) for p in prompts_of()]}
    job |= {"page": page, "layers": layers, "steps": NEW - 1}
    (folder / "job.json").write_text(json.dumps(job))
    worker = Path(__file__).with_name("sglang_worker.py")
    run(python, worker, folder / "job.json", folder / "result.json")
    result = json.loads((folder / "result.json").read_text())
    assert result["shared"] > 0
    read: list[list[list[list[int]]]] = result["read"]
    return read


@pytest.mark.parametrize("name", HEADS)
def test_attention_reads_the_rows_that_our_runtime_reads(name: str, python: Path, tmp_path: Path) -> None:
    config, prompts, target = HEADS[name], prompts_of(), random_target("llama_micro", seed=1)
    head = exported(tmp_path, config, target)
    texts, ours = decoded(head, config, target, prompts)
    found = read_by_sglang(python, tmp_path, texts, 1, target.info.n_layers)
    for step, (mine, read) in enumerate(zip(ours, found, strict=True)):
        for b, prompt in enumerate(prompts):
            at = len(prompt) + step
            whole = [[*range(at + 1)]] * target.info.n_layers
            chosen = [[*rows, at] for rows in mine[b]]
            assert read[b] == (whole if len(prompt) < LEAST else chosen)


def test_attention_reads_whole_pages_up_to_the_steps_token(python: Path, tmp_path: Path) -> None:
    config, prompts, target = HEADS["one set"], prompts_of(), random_target("llama_micro", seed=1)
    head = exported(tmp_path, config, target)
    texts, _ = decoded(head, config, target, prompts)
    for step, read in enumerate(read_by_sglang(python, tmp_path, texts, 4, target.info.n_layers)):
        for b in (0, 2):
            at = len(prompts[b]) + step
            (rows,) = {tuple(rows) for rows in read[b]}
            pages = sorted({row // 4 for row in rows})
            assert list(rows) == [row for page in pages for row in range(4 * page, min(4 * page + 4, at + 1))]
            assert len(pages) == 5 and {0, 1, *range(at - 4, at + 1)} <= {*rows}
