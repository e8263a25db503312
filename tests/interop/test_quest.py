"""Our Quest against that of the sparse-attention-hub package (its QuestTopKMasker), on the same q and k.

Ours differs in this, and the cases make it equal:

- budget: ours is a number of rows, of which the last page may be read in part; theirs a number of whole
  pages, at least three, whatever rows the text's last page has;
- sinks and window: a part of our budget; in theirs beside it, and their pages can be chosen a second time;
- query heads of a KV head: ours read one set, by the mean of their bounds; theirs one each.

The package is not on the package index: a commit of it is fetched from GitHub, unless
LONGTRAIN_SPARSE_ATTENTION_HUB names a checkout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from environments import Environment, run

from longtrain.cache.entry_sets import ReadBudget, choose_entries
from longtrain.methods.sparse.config import Config
from longtrain.methods.sparse.rules import QuestRule, page_bounds

pytestmark = pytest.mark.slow
COMMIT = "fb7f9a61a83867809bf38bd9fbddeb7f06ccd0c7"
ARCHIVE = f"https://github.com/xAlg-ai/sparse-attention-hub/archive/{COMMIT}.zip"
B, G, D = 2, 3, 16


@pytest.fixture(scope="module")
def package() -> Path:
    """The folder that holds the package `sparse_attention_hub`."""
    if given := os.environ.get("LONGTRAIN_SPARSE_ATTENTION_HUB"):
        return Path(given)
    python = Environment("quest", ("setuptools",), alone=(f"sparse-attention-hub @ {ARCHIVE}",)).python()
    (folder,) = python.parents[1].glob("lib/python*/site-packages")
    return folder


def case(
    rows: int, page: int, pages: list[int], *, per: int = 1, forced: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """Keys and one query a head, the same in the query heads of a KV head; rows that are read in any case."""
    gen = torch.Generator().manual_seed(rows * 100 + page)
    first_K = torch.arange(rows) < forced[0]
    last_K = torch.arange(rows) >= rows - forced[1]
    q_BGTD = torch.randn(B, G, 1, D, generator=gen)
    k_BGKD = torch.randn(B, G, rows, D, generator=gen)
    found = {"q": q_BGTD.repeat_interleave(per, 1), "k": k_BGKD, "page": page, "pages": pages}
    return found | {"forced": (first_K | last_K).float(), "budget": forced}


def theirs(package: Path, folder: Path, cases: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """Rows of each case and number of pages, bool [B, H, K]."""
    torch.save(cases, folder / "job.pt")
    worker = Path(__file__).with_name("quest_worker.py")
    run(sys.executable, worker, package, folder / "job.pt", folder / "result.pt")
    found: list[list[torch.Tensor]] = torch.load(folder / "result.pt")
    return found


def ours(one: dict[str, Any], rows: int) -> torch.Tensor:
    """Rows of a budget, bool [B, G, K], chosen as the runtime does, beside slots that hold nothing."""
    q_BHTD, k_BGKD, (sinks, window) = one["q"], one["k"], one["budget"]
    S, K = k_BGKD.shape[2] + 5, k_BGKD.shape[2]
    k_BGSD = torch.full((B, G, S, D), 9.0)
    k_BGSD[:, :, :K] = k_BGKD
    budget, len_B = ReadBudget(rows, sinks=sinks, window=window), torch.full((B,), K)
    rule = QuestRule(budget, Config(rule="quest", page=one["page"]), SimpleNamespace())
    scores_BGS = rule.at_layer(0, q_BHTD, k_BGSD, len_B)
    idx_BGK = choose_entries(scores_BGS, len_B, budget)[..., : min(rows, K)]
    return torch.zeros(B, G, S, dtype=torch.bool).scatter_(2, idx_BGK, True)[:, :, :K]


def test_the_same_rows_where_the_budgets_are_whole_pages(package: Path, tmp_path: Path) -> None:
    """Three pages and more, texts of whole pages, as many query heads as KV heads and more."""
    cases = [case(256, 16, [3, 4, 9, 15]), case(160, 4, [3, 20]), case(128, 16, [5], per=4)]
    for one, found in zip(cases, theirs(package, tmp_path, cases), strict=True):
        per = one["q"].shape[1] // G
        for pages, rows_BHK in zip(one["pages"], found, strict=True):
            mine_BGK = ours(one, pages * one["page"])
            assert torch.equal(rows_BHK, mine_BGK.repeat_interleave(per, 1))
            assert rows_BHK.sum(-1).eq(pages * one["page"]).all()


def test_what_a_short_last_page_leaves_goes_to_the_next_page(package: Path, tmp_path: Path) -> None:
    """Where theirs reads the text's last page, of 13 rows, ours reads three of the next best page too."""
    one = case(16 * 12 + 13, 16, [3, 6, 12])
    short = 0
    for pages, rows_BHK in zip(one["pages"], theirs(package, tmp_path, [one])[0], strict=True):
        mine_BGK = ours(one, pages * 16)
        assert not (rows_BHK & ~mine_BGK).any()
        ranked_BGP = page_bounds(
            one["q"][:, :, 0], one["k"], torch.full((B,), one["k"].shape[2]), 16
        ).argsort(dim=-1, descending=True)
        more_BGK = mine_BGK & ~rows_BHK
        for b, g in more_BGK.any(-1).nonzero().tolist():
            assert more_BGK[b, g].sum() == 3
            assert {*(more_BGK[b, g].nonzero()[:, 0] // 16).tolist()} == {int(ranked_BGP[b, g, pages])}
            short += 1
        assert torch.equal(more_BGK.any(-1), rows_BHK[..., -1])
    assert 0 < short < 3 * B * G


def test_sinks_and_window_are_a_part_of_our_budget(package: Path, tmp_path: Path) -> None:
    """Theirs reads them beside its pages: of its masks the one that has as many rows as ours is ours."""
    one, rows = case(320, 16, [*range(3, 20)], forced=(16, 32)), 160
    found, mine_BGK = theirs(package, tmp_path, [one])[0], ours(one, rows)
    for b in range(B):
        for g in range(G):
            same = [rows_BHK[b, g] for rows_BHK in found if rows_BHK[b, g].sum() == rows]
            assert same and all(torch.equal(row_K, mine_BGK[b, g]) for row_K in same)
