"""Moves of rows, and what they leave, written out."""

import torch

from longtrain.kernels.entry_moves import EntryLists, Pages

L, B, G, E = 3, 2, 2, 24


def move_case(*, paged: str = "", counted: bool = True, parts: int = 1, seed: int = 0, device="cpu"):
    """Goal, source, lists and pages; either side in pages; parts lie side by side in the source alone."""
    rng = torch.Generator().manual_seed(seed)
    rows, entries, size = 37, 21, 5

    def block(in_pages):
        count = 9 * size if in_pages else rows
        one = torch.randn(1 if in_pages else L, B, G, count, parts, 2 * E, generator=rng)[..., :E]
        one = one.squeeze(4) if parts == 1 else one
        return one.expand(L, *one.shape[1:]) if in_pages else one

    def pages():
        at = torch.stack([torch.randperm(9, generator=rng)[:8] for _ in range(L)])
        at[1, 3] = -1
        return Pages(at.to(device), size)

    goal, source = block(paged == "goal").to(device), block(paged == "source").to(device)
    if parts > 1:
        goal = goal.permute(4, 0, 1, 2, 3, 5).contiguous().permute(1, 2, 3, 4, 0, 5)
    to, source_rows = (
        torch.stack([torch.randperm(rows, generator=rng)[:entries] for _ in range(B * 4)]).view(B, 4, -1)
        for _ in range(2)
    )
    to[0, 1, 3] = source_rows[1, 2, 4] = -1
    n = torch.randint(0, entries + 4, (1 if seed else L, B, 4), generator=rng) if counted else None
    sets = torch.randint(0, 4, (L, G), generator=rng)
    if paged == "goal":  # layers share a block: one of them alone, or they would write over each other
        goal, source, sets, n = goal[:1], source[:1], sets[:1], n if n is None else n[:1]
    lists = EntryLists(
        to.to(device), source_rows.to(device), sets.to(device), n if n is None else n.to(device)
    )
    return goal, source, lists, {f"{paged}_pages": pages()} if paged else {}


def written_out(goal, source, lists, pages):
    """The goal afterwards, entry by entry."""
    goal = goal.clone()

    def placed(row, layer, side):
        where = pages.get(f"{side}_pages")
        if where is None or row < 0:
            return row
        page = int(where.at_LC[layer, row // where.size])
        return -1 if page < 0 else page * where.size + row % where.size

    for layer in range(goal.shape[0]):
        for b in range(B):
            for g in range(G):
                x = int(lists.sets_LG[layer, g])
                n = lists.n_LBX
                count = lists.to_BXM.shape[-1] if n is None else int(n[min(layer, len(n) - 1), b, x])
                pairs = zip(lists.to_BXM[b, x].tolist(), lists.from_BXM[b, x].tolist(), strict=True)
                for to, row in list(pairs)[:count]:
                    to, row = placed(to, layer, "goal"), placed(row, layer, "source")
                    if min(to, row) >= 0:
                        goal[layer, b, g, to] = source[layer, b, g, row]
    return goal
