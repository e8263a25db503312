"""Samples of prepared data as coloured text: green tokens are labels, dim ones are only read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from longtrain.data.rows.prepared import Prepared

SHOWN_TOKENS = 400
LABEL, READ = "bold green", "dim"


def samples(data: Prepared, tokenizer: Any, count: int, *, seed: int = 0) -> Iterator[Any]:
    """`count` documents spread over the text kinds, as `rich.text.Text`, for a person to look at.

    Args:
        data: prepared data.
        tokenizer: what it was tokenised with.
        count: documents.
        seed: which ones.
    """
    from rich.text import Text

    order = np.random.default_rng(seed).permutation(len(data.start))
    rank = np.empty(len(order), np.int64)
    for kind in np.unique(data.kind):
        mine = order[data.kind[order] == kind]
        rank[mine] = np.arange(len(mine))
    for doc in order[np.argsort(rank[order], kind="stable")][:count].tolist():
        ids, mask = _stretch(data, doc)
        head = f"{data.names[doc]} ({data.kinds[data.kind[doc]]}, {'val' if data.val[doc] else 'train'}): "
        share = f"{data.labels[doc]} labels of {data.length[doc]} tokens"
        text = Text(head + share + "\n", style="bold")
        if len(ids) < data.length[doc]:
            text.append("[...]", style=READ)
        for token, label in zip(ids.tolist(), mask.tolist(), strict=True):
            piece = tokenizer.decode([token], skip_special_tokens=False)
            text.append(piece.replace("\n", "⏎\n") if label else piece, style=LABEL if label else READ)
        yield text


def _stretch(data: Prepared, doc: int) -> tuple[np.ndarray, np.ndarray]:
    """The document's tokens, or the stretch around its last answer's beginning."""
    start, length = int(data.start[doc]), int(data.length[doc])
    mask = np.asarray(data.mask[start : start + length])
    edges = np.flatnonzero(np.diff(mask.astype(np.int8)) == 1)
    middle = int(edges[-1]) if len(edges) else SHOWN_TOKENS // 2
    begin = max(0, min(middle - SHOWN_TOKENS // 2, length - SHOWN_TOKENS))
    end = min(length, begin + SHOWN_TOKENS)
    return np.asarray(data.ids[start + begin : start + end]), mask[begin:end]
