"""Moves rows between two blocks of memory, either of which may be pinned host memory.

For every layer, sequence and KV head a list says which row of the source goes to which row of the goal.
Lists and their lengths lie on the device, so a launch serves every list, and nothing is asked of the host.
On CUDA a Triton kernel reads and writes pinned host memory through its device pointer: rows of some hundred
bytes each move far faster so than by one copy a row. Everywhere else `reference` does the same in torch.

Either side may lie in pages: row r of a layer is then row `pages[r // size] * size + r % size` of the block.
A row may consist of parts that lie apart on one side and side by side on the other, such as a token's rows of
several layers: blocks are then [L, B, G, rows, P, E].
Shapes: L layers, B batch, G KV heads, R and S rows, P parts of a row, E numbers of a part, X lists of a
sequence, M entries of a list, C pages of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longtrain.errors import ConfigError
from longtrain.kernels.devices import compiles_for, interpreted
from longtrain.kernels.row_moves import reference

__all__ = ["Pages", "Programs", "RowLists", "move_rows"]


@dataclass(frozen=True)
class Pages:
    """Where the rows of each layer lie in a block that all layers share.

    Args:
        at_LC: page of the block that holds each page of a layer, int64; -1: none, its rows are left alone.
        size: rows of a page.
    """

    at_LC: Tensor
    size: int


@dataclass(frozen=True)
class RowLists:
    """Which rows are moved.

    Args:
        to_BXM: row of the goal, int64; below 0: the entry is left out.
        from_BXM: row of the source, likewise.
        sets_LG: the list that each KV head of each layer follows, int64.
        n_LBX: entries of each list that count, int64, in each layer (L may be 1 here: in all); None: all.
    """

    to_BXM: Tensor
    from_BXM: Tensor
    sets_LG: Tensor
    n_LBX: Tensor | None = None


@dataclass(frozen=True)
class Programs:
    """How much of the host's memory is on its way at once: more slows down what the GPU does beside it.

    Args:
        most: programs of the kernel. Layers are moved in their order.
        numbers: of rows, that each of them moves at once, a power of two.
    """

    most: int
    numbers: int = 4096


def move_rows(
    goal_LBGRE: Tensor,
    source_LBGSE: Tensor,
    lists: RowLists,
    *,
    goal_pages: Pages | None = None,
    source_pages: Pages | None = None,
    programs: Programs | None = None,
) -> None:
    """Copy rows as the lists say; rows of the goal that no entry names keep their content.

    The two blocks must not overlap in rows that are read and written, and no two entries may name one goal.

    Args:
        goal_LBGRE: written; E contiguous, other strides of any size (0 over layers where all share pages). Or
            [L, B, G, R, P, E].
        source_LBGSE: read, likewise; of the goal's dtype.
        lists: on the device that moves the rows.
        goal_pages: where the goal's rows lie; None: at their own numbers.
        source_pages: where the source's rows lie.
        programs: see `Programs`; None: as many as there are rows to move.

    Raises:
        ConfigError: a CUDA device without Triton's kernels.
    """
    device = lists.to_BXM.device
    goal_LBGRPE, source_LBGSPE = (
        one if one.dim() == 6 else one.unsqueeze(4) for one in (goal_LBGRE, source_LBGSE)
    )
    if interpreted() or compiles_for(device):
        from longtrain.kernels.row_moves import launch

        launch.move_rows(goal_LBGRPE, source_LBGSPE, lists, goal_pages, source_pages, programs)
        return
    if device.type == "cuda":
        raise ConfigError(
            f"rows are moved by a Triton kernel on {device}, which needs triton and compute capability 8.0 "
            f"(here {torch.cuda.get_device_capability(device)}); decode without cache=elastic"
        )
    reference.move_rows(goal_LBGRPE, source_LBGSPE, lists, goal_pages, source_pages)
