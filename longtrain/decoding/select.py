"""From scores to the rows that stay: reduction over heads, pooling, and the best rows of each head.

Everything runs over all layers and sequences at once, and reads nothing back to the host; only head-adaptive
budgets pay one read, of their counts.
Shapes: L layers, B sequences, S prompt slots, H query heads, G KV heads, K kept rows, X rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from longtrain.decoding.evict import Budget, Keep
from longtrain.errors import ConfigError, refusal

Budgets: TypeAlias = Budget | Sequence[Sequence[int]]
"""The same for every layer, or rows [L][B] on the host (a pyramid)."""


def reduce_heads(s_BHS: Tensor, n_kv_heads: int, how: Literal["mean", "max"] = "mean") -> Tensor:
    """Scores of the query heads that share a KV head, as one: s_BGS."""
    B, H, S = s_BHS.shape
    s_BGgS = s_BHS.view(B, n_kv_heads, H // n_kv_heads, S)
    return s_BGgS.mean(2) if how == "mean" else s_BGgS.amax(2)


def max_pool(s_LBGS: Tensor, lengths: Sequence[int], *, kernel: int = 7) -> Tensor:
    """Each slot's maximum over `kernel` slots around it, within its sequence; padding means nothing.

    Raises:
        ConfigError: `kernel` is even or below 1.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise refusal(ConfigError, f"pooling kernel {kernel}", "1 (off), 3, 5, 7, ... (evict.kernel)")
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
    """The best rows of each layer, sequence and KV head; of equal scores the lower position.

    Args:
        s_LBGS: scores, any float; slots from a sequence's length on count for nothing, and NaN for the least.
        lengths: prompt tokens of each sequence, on the host.
        budgets: rows kept, the protected ones included; where it is no less than the length, all are.
        protect_last: rows at the end of each prompt that stay whatever their score (a window).
        protect_first: rows at its start that do (sinks).

    Raises:
        ConfigError: a prompt would be evicted to fewer rows than are protected.
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
    """As `top`, with rows moved to the heads whose scores want them; the budget holds on average.

    With b = budget - protected, the best b rows a head are found among all heads of a layer (or of all
    layers); a head with c of them keeps c (1 - floor) + b floor of its own best, in whole rows.

    Args:
        s_LBGS: scores as in `top`; comparable between heads.
        lengths: tokens of each prompt, as in `top`.
        budget: rows kept of each head on average, the protected ones included.
        protect_last: last tokens that always stay, as in `top`.
        protect_first: first tokens that always stay, as in `top`.
        floor: share of the budget that every head keeps.
        across: what shares one budget: the heads of a layer, or those of all layers.
        exact: shares are rounded down and the rows left over go to the largest fractions, so that those who
            share a budget keep its total to the row. Else each keeps round(c (1 - floor) + int(b floor)).
            Either way at least one.

    Raises:
        ConfigError: the budget is below the protected rows, or `floor` is out of range.

    Source: Ada-KV (arXiv 2407.11550), Algorithm 1 with its safeguard; their code rounds as `exact=False`.
    Note: with `exact=False` the total may be missed: up to about 1.5 rows a head fewer, or half a row more.
    """
    if not 0 <= floor <= 1:
        raise refusal(ConfigError, f"evict.floor={floor}", "0 to 1")
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
    groups_XS = rivals.transpose(0, 1).reshape(B * L if across == "heads" else B, -1)
    each = torch.tensor([max(1, spare * shared) for spare in spare_B]).repeat_interleave(len(groups_XS) // B)
    won_BLGS = (_chosen(groups_XS, each) & (groups_XS > -torch.inf)).view(B, L, G, S)
    won_LBG = won_BLGS.sum(-1).transpose(0, 1).cpu().double()
    spare_B1 = torch.tensor(spare_B, dtype=torch.float64)[:, None]
    won_LBG = won_LBG * (spare_B1 > 0)  # of none to spare nobody won the one counted above
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
    """Mask of the best slots of heads that share their rows; no head is given more than its scores win.

    Args:
        s_LBGS: scores, no NaN; a slot of -inf is never kept, one of +inf before all others.
        rows: rows of each sequence, a head's share; what a group may keep is this times its heads.
        across: what shares: nothing (each head its own), the heads of a layer, or those of all layers.
    """
    L, B, G, S = s_LBGS.shape
    s_BLGS = s_LBGS.transpose(0, 1)
    shared = {False: 1, "heads": G, "layers": L * G}[across]
    s_XS = s_BLGS.reshape(-1, shared * S)
    n_X = torch.tensor([shared * n for n in rows]).repeat_interleave(len(s_XS) // B)
    chosen_XS = _chosen(s_XS, n_X) & (s_XS > -torch.inf)
    return chosen_XS.view(B, L, G, S).transpose(0, 1)


def rows_of(chosen_LBGS: Tensor) -> Keep:
    """Chosen slots as rows to keep; reads their counts back to the host."""
    return _positions(chosen_LBGS.flatten(0, 2), chosen_LBGS.sum(-1).cpu())


def check_protected(rows: int, protected: int) -> None:
    """Refuse a budget that has no room for the rows a policy always keeps.

    Raises:
        ConfigError: it has none.
    """
    if rows < protected:
        raise ConfigError(
            f"an eviction budget of {rows} rows is below the {protected} that the policy keeps in any case "
            f"(window, sinks); set evict.budget_tokens={protected} or more, or a smaller evict.window"
        )


def _whole(shares: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """Shares as whole rows, `least` to `most` each, that sum to `total` as far as these bounds let them.

    Of a share's whole rows all count; those left over go to the largest fractions, of equal ones the first.
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
    """Slot numbers [S] and lengths [B, 1, 1], on the device."""
    device = s_LBGS.device
    n_B11 = torch.tensor(lengths).to(device, non_blocking=True)[:, None, None]
    return torch.arange(s_LBGS.shape[-1], device=device), n_B11


def _only_real(s_LBGS: Tensor, lengths: Sequence[int]) -> Tensor:
    """Scores with -inf from each sequence's end on, and where they are not a number."""
    nothing = s_LBGS.isnan()
    if min(lengths) < s_LBGS.shape[-1]:
        slot_S, n_B11 = _slots(s_LBGS, lengths)
        nothing |= slot_S >= n_B11
    return s_LBGS.masked_fill(nothing, -torch.inf)


def _protected(s_LBGS: Tensor, lengths: Sequence[int], first: int, last: int, value: float) -> Tensor:
    """Scores with `value` at the protected slots."""
    if not first and not last:
        return s_LBGS
    slot_S, n_B11 = _slots(s_LBGS, lengths)
    inside = (slot_S < n_B11) & ((slot_S < first) | (slot_S >= n_B11 - last))
    return s_LBGS.masked_fill(inside, value)


def _chosen(s_XS: Tensor, n_X: Tensor) -> Tensor:
    """Which entries are the best `n_X` of each row; of equal ones the first.

    `topk` says nothing about the order of equal entries, so it only gives the n-th best value; entries above
    it are in, and as many of those equal to it as there is room for, from the left. Nothing is sorted, and
    the result is the same on every device.

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
    """Positions of the best `n_LBG` slots, ascending."""
    s_XS, n_X = s_LBGS.flatten(0, 2), n_LBG.flatten()
    return _positions(_chosen(s_XS, n_X), n_LBG)


def _positions(chosen_XS: Tensor, n_LBG: Tensor) -> Keep:
    """Positions of the chosen slots, of which there are `n_LBG`, ascending."""
    count_XS, n_X = chosen_XS.cumsum(1, dtype=torch.int32), n_LBG.flatten()
    K, device = int(n_X.max()), chosen_XS.device
    nth_XK = torch.arange(1, K + 1, device=device, dtype=torch.int32).expand(len(n_X), K).contiguous()
    idx_XK = torch.searchsorted(count_XS, nth_XK)  # where the count first reaches 1, 2, ..., K
    inside = nth_XK <= n_X[:, None].to(device, non_blocking=True)
    return Keep(torch.where(inside, idx_XK, 0).view(*n_LBG.shape, K), n_LBG)
