"""Run by test_quest.py where sparse-attention-hub lies: `quest_worker.py FOLDER JOB.pt RESULT.pt`.

The package's own Quest masker alone: the packages above it import every other method and what those need, so
they are stood in for, and so is ray, of which the masker takes lists of values to search.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ROOT = Path(sys.argv[1])
MASKERS = "sparse_attention_hub.sparse_attention.research_attention.maskers"


def stand_in(name: str, **names: Any) -> None:
    """A package of this name without its own code; what is below it is the real one."""
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = [str(ROOT.joinpath(*name.split(".")))]
    vars(module).update(names)


words = f"{MASKERS}.fixed.implementations".split(".")
for count in range(1, len(words) + 1):
    stand_in(".".join(words[:count]))
for package in (
    "sparse_attention.utils",
    "sparse_attention.research_attention.maskers.fixed.implementations.utils",
):
    stand_in(f"sparse_attention_hub.{package}")
stand_in("ray", tune=SimpleNamespace(grid_search=list))

quest = importlib.import_module(f"{MASKERS}.fixed.implementations.quest_top_k")
Mask = importlib.import_module("sparse_attention_hub.sparse_attention.utils.mask").Mask


def rows_of(case: dict[str, Any], pages: int) -> torch.Tensor:
    """Rows of a mask with so many pages, bool [B, H, K]."""
    config = quest.QuestTopKMaskerConfig(heavy_size=pages * case["page"], page_size=case["page"])
    q_BHTD, k_BGKD = case["q"], case["k"]
    shape = (*q_BHTD.shape[:3], k_BGKD.shape[2])
    before = Mask.create_mask_from_dense_mask(
        shape, case["forced"].expand(shape).clone(), dtype=torch.float32
    )
    mask = quest.QuestTopKMasker.create_from_config(config).add_mask(
        keys=k_BGKD, queries=q_BHTD, values=k_BGKD, attention_mask=None, scaling=1.0, dropout=0.0,
        sparse_meta_data={}, previous_mask=before,
    )  # fmt: skip
    return mask.get_dense_mask()[:, :, 0] != 0


torch.save(
    [[rows_of(case, pages) for pages in case["pages"]] for case in torch.load(sys.argv[2])], sys.argv[3]
)
