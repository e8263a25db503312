"""Selection of KV entries by score: reduction over heads, pooling, and top-k for each head.

All layers and sequences are processed at once, and nothing is read back to the host but the counts of
head-adaptive budgets.

Shapes: L layers, B sequences, S prompt positions, H query heads, G KV heads, K kept entries, X groups of
heads that share a budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from longtrain.decoding.evict import Budget, Keep
from longtrain.errors import ConfigError

Budgets: TypeAlias = Budget | Sequence[Sequence[int]]
"""The same for every layer, or numbers of entries [L][B] on the host (a pyramid)."""


def reduce_heads(s_BHS: Tensor, n_kv_heads: int, how: Literal["mean", "max"] = "mean") -> Tensor:
    """Reduce the scores of the query heads that share a KV head to one: [B, H, S] to s_BGS."""
    B, H, S = s_BHS.shape
    s_BGgS = s_BHS.view(B, n_kv_heads, H // n_kv_heads, S)  # [B, H, S] -> [B, G, H / G, S]
    return s_BGgS.mean(2) if how == "mean" else s_BGgS.amax(2)


def max_pool(s_LBGS: Tensor, lengths: Sequence[int], *, kernel: int = 7) -> Tensor:
    """Maximum over a window of `kernel` positions (odd), within each sequence; padding is ignored."""
    s_LBGS = _only_real(s_LBGS, lengths)
    if kernel == 1:
        return s_LBGS
    return max_pool1d(s_LBGS.flatten(0, 1), kernel, stride=1, padding=kernel // 2).view(s_LBGS.shape)


def top(
    s_LBGS: Tensor,
    lengths: Sequence[int],
    budgets: Budgets,
    *,
    protect_last: int = 0,
    protect_first: int = 0,
) -> Keep:
    """The best entries of each layer, sequence and KV head; ties go to the lower position.

    Args:
        s_LBGS: scores, any float; positions beyond a sequence's length are ignored, NaN is the lowest.
        lengths: prompt tokens of each sequence, on the host.
        budgets: number of entries to keep, protected ones included; all, if it is not below the length.
        protect_last: number of last entries that are always kept (a window).
        protect_first: number of first entries that are always kept (sinks).

    Raises:
        ConfigError: a budget is below the number of protected entries.
    """
    L, B, G, _ = s_LBGS.shape
    n_LB = torch.tensor(
        [
            [min(_of(budgets, layer, b, length), length) for b, length in enumerate(lengths)]
            for layer in range(L)
        ]
    )
    cut = [n for row in n_LB.tolist() for n, length in zip(row, lengths, strict=True) if n < length]
    if cut:
        check_protected(min(cut), protect_first + protect_last)
    ranked = _protected(_only_real(s_LBGS, lengths), lengths, protect_first, protect_last, torch.inf)
    return _best(ranked, n_LB[..., None].expand(L, B, G))


def top_adaptive(
    s_LBGS: Tensor,
    lengths: Sequence[int],
    budget: Budget,
    *,
    protect_last: int = 0,
    protect_first: int = 0,
    floor: float = 0.2,
    across: Literal["heads", "layers"] = "heads",
    exact: bool = True,
) -> Keep:
    """As `top`, with a budget shared by heads: heads with higher scores keep more, at the same average.

    With b = budget - protected, the best b entries per head are found among all heads of a layer (or of all
    layers). A head that has c of them keeps its own best c (1 - floor) + b floor entries, rounded.

    Args:
        s_LBGS: scores as in `top`; comparable between heads.
        lengths: tokens of each prompt, as in `top`.
        budget: entries kept per head on average, protected ones included.
        protect_last: last entries that are always kept, as in `top`.
        protect_first: first entries that are always kept, as in `top`.
        floor: share of the budget that every head keeps.
        across: heads that share one budget: those of a layer, or those of all layers.
        exact: round down and give the remaining entries to the largest fractions, so that the heads that
            share a budget keep its exact total. Else each keeps round(c (1 - floor) + int(b floor)). At least
            one either way.

    Raises:
        ConfigError: the budget is below the number of protected entries.

    Source: Ada-KV (arXiv 2407.11550), Algorithm 1 with its safeguard; their code rounds as `exact=False`.
    Note: with `exact=False` the total is approximate: up to about 1.5 entries per head fewer, or 0.5 more.
    """
    L, B, G, S = s_LBGS.shape
    protected = protect_first + protect_last
    spare_B = []
    for length in lengths:
        rows = budget.of(length)
        if rows < length:
            check_protected(rows, protected)
        spare_B.append(rows - protected if rows < length else 0)
    free = _only_real(s_LBGS, lengths)
    rivals = _protected(free, lengths, protect_first, protect_last, -torch.inf)
    shared = G if across == "heads" else L * G
    # concatenate heads that share a budget: [L, B, G, S] -> [B * L, G * S] or [B, L * G * S]
    groups_XS = rivals.transpose(0, 1).reshape(B * L if across == "heads" else B, -1)
    each = torch.tensor([max(1, spare * shared) for spare in spare_B]).repeat_interleave(len(groups_XS) // B)
    won_BLGS = (_chosen(groups_XS, each) & (groups_XS > -torch.inf)).view(B, L, G, S)
    won_LBG = won_BLGS.sum(-1).transpose(0, 1).cpu().double()
    spare_B1 = torch.tensor(spare_B, dtype=torch.float64)[:, None]
    won_LBG = won_LBG * (spare_B1 > 0)  # a budget of 0 was counted as 1 above
    length_B1 = torch.tensor(lengths)[:, None]
    fits_B1 = torch.tensor([budget.of(length) >= length for length in lengths])[:, None]
    if exact:
        n_LBG = torch.empty(L, B, G, dtype=torch.int64)
        for b, (length, spare) in enumerate(zip(lengths, spare_B, strict=True)):
            share_XH = (won_LBG[:, b] * (1 - floor) + spare * floor).reshape(-1, shared).tolist()
            rows_XH = [
                _whole(row, spare * shared, 1 - min(1, protected), length - protected) for row in share_XH
            ]
            n_LBG[:, b] = torch.tensor(rows_XH).view(L, G) + protected
    else:
        n_LBG = (won_LBG * (1 - floor) + (spare_B1 * floor).floor()).round().long().clamp(min=0) + protected
    n_LBG = torch.where(fits_B1, length_B1, n_LBG.clamp(min=1).minimum(length_B1))
    return _best(_protected(free, lengths, protect_first, protect_last, torch.inf), n_LBG)


def best_of_groups(
    s_LBGS: Tensor, rows: Sequence[int], *, across: Literal[False, "heads", "layers"]
) -> Tensor:
    """Mask of the best positions of heads that share a budget.

    Args:
        s_LBGS: scores, no NaN; -inf is never kept, +inf before all others.
        rows: entries of each sequence per head; a group of heads keeps this times its heads.
        across: heads that share a budget: none (each has its own), those of a layer, or those of all layers.
    """
    L, B, G, S = s_LBGS.shape
    s_BLGS = s_LBGS.transpose(0, 1)
    shared = {False: 1, "heads": G, "layers": L * G}[across]
    s_XS = s_BLGS.reshape(-1, shared * S)  # heads that share a budget, concatenated
    n_X = torch.tensor([shared * n for n in rows]).repeat_interleave(len(s_XS) // B)
    chosen_XS = _chosen(s_XS, n_X) & (s_XS > -torch.inf)
    return chosen_XS.view(B, L, G, S).transpose(0, 1)


def rows_of(chosen_LBGS: Tensor) -> Keep:
    """Convert a mask of positions to `Keep`; reads the counts back to the host."""
    return _positions(chosen_LBGS.flatten(0, 2), chosen_LBGS.sum(-1).cpu())


def check_protected(rows: int, protected: int) -> None:
    """Refuse a budget below the number of entries that a policy always keeps.

    Raises:
        ConfigError: the budget is below that number.
    """
    if rows < protected:
        raise ConfigError(
            f"an eviction budget of {rows} entries is below the {protected} that the policy always keeps "
            f"(window, sinks); set evict.budget_tokens={protected} or more, or a smaller evict.window"
        )


def _whole(shares: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """Round shares to integers from `least` to `most` that sum to `total` as far as these bounds allow.

    Shares are rounded down, and the remaining units go to the largest fractions, the first of equal ones.
    """
    shares = [round(share, 9) for share in shares]  # 4.999999999999 is 5
    rows = [min(max(int(share), least), most) for share in shares]
    while left := total - sum(rows):
        step, bound = (1, most) if left > 0 else (-1, least)
        open_ = [h for h, n in enumerate(rows) if n != bound]
        if not open_:
            break
        for h in sorted(open_, key=lambda h: -step * (shares[h] - rows[h]))[: abs(left)]:
            rows[h] += step
    return rows


def _of(budgets: Budgets, layer: int, b: int, length: int) -> int:
    return budgets.of(length) if isinstance(budgets, Budget) else int(budgets[layer][b])


def _slots(s_LBGS: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Positions [S] and lengths [B, 1, 1], on the device."""
    device = s_LBGS.device
    n_B11 = torch.tensor(lengths).to(device, non_blocking=True)[:, None, None]
    return torch.arange(s_LBGS.shape[-1], device=device), n_B11


def _only_real(s_LBGS: Tensor, lengths: Sequence[int]) -> Tensor:
    """Scores with -inf beyond each sequence's length, and in place of NaN."""
    nothing = s_LBGS.isnan()
    if min(lengths) < s_LBGS.shape[-1]:
        slot_S, n_B11 = _slots(s_LBGS, lengths)
        nothing |= slot_S >= n_B11
    return s_LBGS.masked_fill(nothing, -torch.inf)


def _protected(s_LBGS: Tensor, lengths: Sequence[int], first: int, last: int, value: float) -> Tensor:
    """Scores with `value` at the protected positions."""
    if not first and not last:
        return s_LBGS
    slot_S, n_B11 = _slots(s_LBGS, lengths)
    inside = (slot_S < n_B11) & ((slot_S < first) | (slot_S >= n_B11 - last))
    return s_LBGS.masked_fill(inside, value)


def _chosen(s_XS: Tensor, n_X: Tensor) -> Tensor:
    """Mask of the best `n_X` elements of each matrix row; ties go to the first.

    `topk` does not define the order of equal elements, so it only gives the n-th best value: larger elements
    are selected, and as many equal ones as needed, from the left. The result is the same on every device.

    Args:
        s_XS: no NaN.
        n_X: 1..S, on the host.
    """
    n_X1 = n_X[:, None].to(s_XS.device, non_blocking=True)
    nth_X1 = s_XS.topk(int(n_X.max()), dim=1).values.gather(1, n_X1 - 1)
    above, equal = s_XS > nth_X1, s_XS == nth_X1
    room_X1 = n_X1 - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1, dtype=torch.int32) <= room_X1))


def _best(s_LBGS: Tensor, n_LBG: Tensor) -> Keep:
    """The best `n_LBG` positions, ascending."""
    s_XS, n_X = s_LBGS.flatten(0, 2), n_LBG.flatten()
    return _positions(_chosen(s_XS, n_X), n_LBG)


def _positions(chosen_XS: Tensor, n_LBG: Tensor) -> Keep:
    """The `n_LBG` positions of a mask, ascending."""
    count_XS, n_X = chosen_XS.cumsum(1, dtype=torch.int32), n_LBG.flatten()
    K, device = int(n_X.max()), chosen_XS.device
    nth_XK = torch.arange(1, K + 1, device=device, dtype=torch.int32).expand(len(n_X), K).contiguous()
    idx_XK = torch.searchsorted(count_XS, nth_XK)  # where the count first reaches 1, 2, ..., K
    inside = nth_XK <= n_X[:, None].to(device, non_blocking=True)
    return Keep(torch.where(inside, idx_XK, 0).view(*n_LBG.shape, K), n_LBG)
