"""Gathers and scatters KV entries between two buffers, either of which may be pinned host memory.

For every layer, sequence and KV head a list of index pairs maps entries of the source to positions of the
goal. Lists and their lengths are on the device, so one launch processes all of them and nothing is read back
to the host. On CUDA a Triton kernel reads and writes pinned host memory through its device pointer, which for
entries of some hundred bytes is far faster than one copy each. Everywhere else `reference` does the same in
torch.

Either side may be paged: entry r of a layer is then at `pages[r // size] * size + r % size` of the buffer. An
entry may consist of parts that are apart on one side and contiguous on the other, such as a token's entries
of several layers: buffers are then [L, B, G, positions, P, E].

Shapes: L layers, B batch, G KV heads, R and S positions, P parts of an entry, E numbers of a part, X lists of
a sequence, M index pairs of a list, C pages of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longtrain.errors import ConfigError
from longtrain.kernels.devices import compiles_for, interpreted
from longtrain.kernels.entry_moves import reference

__all__ = ["EntryLists", "Pages", "Programs", "move_entries"]


@dataclass(frozen=True)
class Pages:
    """Page table of a buffer that all layers share.

    Args:
        at_LC: index in the buffer of each page of a layer, int64; -1: none, its entries are skipped.
        size: number of entries of a page.
    """

    at_LC: Tensor
    size: int


@dataclass(frozen=True)
class EntryLists:
    """Index pairs of the KV entries to move.

    Args:
        to_BXM: position in the goal, int64; a pair with a negative one is skipped.
        from_BXM: position in the source, likewise.
        sets_LG: index of the list that each KV head of each layer follows, int64.
        n_LBX: number of valid pairs of each list, int64, per layer (L may be 1: the same in all); None: all.
    """

    to_BXM: Tensor
    from_BXM: Tensor
    sets_LG: Tensor
    n_LBX: Tensor | None = None


@dataclass(frozen=True)
class Programs:
    """Limits the concurrent transfers over the host bus: more would slow down kernels that run beside them.

    Args:
        most: number of programs of the kernel. Layers are moved in order.
        numbers: numbers that each program moves at once, a power of two.
    """

    most: int
    numbers: int = 4096


def move_entries(
    goal_LBGRE: Tensor,
    source_LBGSE: Tensor,
    lists: EntryLists,
    *,
    goal_pages: Pages | None = None,
    source_pages: Pages | None = None,
    programs: Programs | None = None,
) -> None:
    """Copy the listed entries from source to goal; all other entries of the goal are unchanged.

    Entries that are read and written must not overlap, and no two pairs may have the same goal.

    Args:
        goal_LBGRE: output; E contiguous, other strides of any size (0 over layers where all share pages). Or
            [L, B, G, R, P, E].
        source_LBGSE: input, likewise, in the goal's dtype.
        lists: index pairs, on the device that runs the kernel.
        goal_pages: page table of the goal; None: it is not paged.
        source_pages: page table of the source; None: it is not paged.
        programs: limits concurrent transfers; None: as many programs as there are entries to move.

    Raises:
        ConfigError: a CUDA device without Triton's kernels.
    """
    device = lists.to_BXM.device
    goal_LBGRPE, source_LBGSPE = (
        one if one.dim() == 6 else one.unsqueeze(4) for one in (goal_LBGRE, source_LBGSE)
    )
    if interpreted() or compiles_for(device):
        from longtrain.kernels.entry_moves import kernel

        kernel.move_entries(goal_LBGRPE, source_LBGSPE, lists, goal_pages, source_pages, programs)
        return
    if device.type == "cuda":
        raise ConfigError(
            f"KV entries are moved by a Triton kernel on {device}, which needs triton and compute capability "
            f"8.0 (here {torch.cuda.get_device_capability(device)}); decode without cache=elastic"
        )
    reference.move_entries(goal_LBGRPE, source_LBGSPE, lists, goal_pages, source_pages)
