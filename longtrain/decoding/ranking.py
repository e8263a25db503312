"""Agreement of two rankings of prompt tokens: recall of the best k, and Kendall's tau-b.

Scores are compared as they are given: pool both or neither (a pooled selection cannot recall more of an
unpooled ranking than its pooling allows).

Shapes: X rankings (a layer and head each, say), S prompt tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.errors import ConfigError, refusal

RECALLS = (64, 128, 256, 512)
"""The k of reported recalls; each is measured on prompts with more than k ranked tokens."""


def recall_at(pred_XS: Tensor, true_XS: Tensor, k: int, valid_XS: Tensor | None = None) -> Tensor:
    """Share of the true best `k` positions that are among the predicted best `k`.

    Args:
        pred_XS: predicted scores, finite; of equal scores the lower position ranks first.
        true_XS: true scores, likewise.
        k: number of best positions; more than there are means all.
        valid_XS: bool mask of the ranked positions; None: all. A ranking without any gives NaN.

    Returns: one share for each ranking, fp32.
    Raises: ConfigError: `k` below 1, or shapes that differ.
    """
    _check(pred_XS, true_XS, valid_XS)
    if k < 1:
        raise refusal(ConfigError, f"recall at k={k}", "1 or more")
    valid_XS = torch.ones_like(pred_XS, dtype=torch.bool) if valid_XS is None else valid_XS
    most_X = valid_XS.sum(-1).clamp(max=k)
    both_XS = _best(pred_XS, most_X, valid_XS) & _best(true_XS, most_X, valid_XS)
    return both_XS.sum(-1).float() / most_X.float()


def kendall_tau(pred_XS: Tensor, true_XS: Tensor) -> Tensor:
    """Kendall's tau-b of two scorings, exact, ties accounted for.

    Pairs are counted in S log² S steps: positions sorted by the first scoring, inversions of the second
    counted as a merge sort would, all rankings and blocks of one width at once.

    Args:
        pred_XS: scores, finite.
        true_XS: the other scores.

    Returns: one value in [-1, 1] for each ranking, fp64; NaN where one side ties everywhere.
    Raises: ConfigError: shapes that differ.
    Source: Kendall 1945, "The treatment of ties in ranking problems"; Knight 1966, "A computer method for
        calculating Kendall's tau with ungrouped data".
    """
    _check(pred_XS, true_XS)
    size = pred_XS.shape[1]
    pred_XS, true_XS = _ranks(pred_XS), _ranks(true_XS)
    both_XS = pred_XS * (size + 1) + true_XS  # one integer that sorts by the first, then by the second
    pairs = size * (size - 1) // 2
    tied_pred_X, tied_true_X, tied_both_X = _tied(pred_XS), _tied(true_XS), _tied(_ranks(both_XS))
    discordant_X = _inversions(both_XS.sort(-1).values % (size + 1), above=size)
    gap_X = pairs - tied_pred_X - tied_true_X + tied_both_X - 2 * discordant_X
    free_X = (pairs - tied_pred_X).double().sqrt() * (pairs - tied_true_X).double().sqrt()
    return (gap_X.double() / free_X).clamp(-1, 1)  # 0 / 0 is NaN


def _check(pred_XS: Tensor, true_XS: Tensor, valid_XS: Tensor | None = None) -> None:
    shapes = [tuple(one.shape) for one in (pred_XS, true_XS, valid_XS) if one is not None]
    if pred_XS.ndim != 2 or len(set(shapes)) != 1:
        raise refusal(ConfigError, f"rankings of shapes {shapes}", "[rankings, positions], the same for all")


def _best(score_XS: Tensor, most_X: Tensor, valid_XS: Tensor) -> Tensor:
    """Mask of the `most_X` largest valid scores of each ranking."""
    counted_XS = score_XS.masked_fill(~valid_XS, -torch.inf)
    order_XS = counted_XS.sort(dim=-1, descending=True, stable=True).indices
    place_S = torch.arange(score_XS.shape[1], device=score_XS.device)
    return torch.zeros_like(valid_XS).scatter_(-1, order_XS, place_S < most_X[:, None])


def _ranks(score_XS: Tensor) -> Tensor:
    """Ranks from 0, equal for equal scores."""
    ordered_XS, order_XS = score_XS.sort(-1)
    steps_XS = torch.zeros_like(order_XS)
    steps_XS[:, 1:] = (ordered_XS[:, 1:] != ordered_XS[:, :-1]).cumsum(-1)
    return torch.empty_like(order_XS).scatter_(-1, order_XS, steps_XS)


def _tied(ranks_XS: Tensor) -> Tensor:
    """Number of pairs of equal rank."""
    counts_XS = torch.zeros_like(ranks_XS).scatter_add_(-1, ranks_XS, torch.ones_like(ranks_XS))
    return (counts_XS * (counts_XS - 1) // 2).sum(-1)


def _inversions(ranks_XS: Tensor, *, above: int) -> Tensor:
    """Pairs i < j with ranks[i] > ranks[j]; `above` is no smaller than any rank and pads the end."""
    rows, size = ranks_XS.shape
    full = 1 << max(0, size - 1).bit_length()
    ranks_XS = torch.nn.functional.pad(ranks_XS, (0, full - size), value=above)
    found_X = ranks_XS.new_zeros(rows)
    width = 2
    while width <= full:
        halves = ranks_XS.view(rows * (full // width), 2, width // 2)
        left, right = halves[:, 0].contiguous(), halves[:, 1].contiguous()
        not_above = torch.searchsorted(left, right, right=True)  # of the left half, for each on the right
        found_X += (width // 2 - not_above).view(rows, -1).sum(-1)
        ranks_XS = ranks_XS.view(-1, width).sort(-1).values.view(rows, full)
        width *= 2
    return found_X
