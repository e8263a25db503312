"""DFlash2's convolution inside a block: each row is mixed with the rows before it, by kernels of its own.

Shapes: A blocks, R rows of a block, E hidden dim, O taps, G groups of channels, C channels of a group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from longtrain.errors import TargetMismatchError


def check_groups(group: int, hidden: int) -> None:
    """Refuse groups of channels that do not fill the hidden dim.

    Raises:
        TargetMismatchError: the target's hidden size is no multiple of `group`.
    """
    if hidden % group:
        raise TargetMismatchError(
            f"method.conv_group={group} channels; the target's hidden size {hidden} allows its divisors"
        )


class BlockConv(nn.Module):
    """The two convolutions around a sublayer; the rows of one block are mixed, and nothing else.

    With x the normed input of the sublayer, x_k = 0 before the block's first row, and y its output:

    `x'_k = sum_o (base[0, o] + D_k[0, o]) x_{k-o}`;  `y'_k = sum_o (base[1, o] + D_k[1, o]) y_{k-o}`

    D = `kernel_projection x` has one number for each group of channels. A new one changes nothing.

    Args:
        hidden: E.
        taps: O, at most R.
        group: C, a divisor of E.

    Source: DFlash2's authors' code; the names are those of their folders.
    """

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)

    def start(self) -> None:
        """Make both convolutions the identity."""
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])

    def forward(self, x_ARE: Tensor, dynamic: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sublayer's input [A, R, E], and the kernels for its output (`finish`).

        Args:
            x_ARE: the normed input.
            dynamic: the output of `kernel_projection`, if it is known already.
        """
        dynamic = self.kernel_projection(x_ARE) if dynamic is None else dynamic
        dynamic_AR2OG = dynamic.unflatten(-1, (2, self.base_kernel.shape[1], -1))
        return _mixed(x_ARE, self.base_kernel[0], dynamic_AR2OG[..., 0, :, :]), dynamic_AR2OG[..., 1, :, :]

    def finish(self, y_ARE: Tensor, dynamic_AROG: Tensor) -> Tensor:
        """Return the sublayer's output after the second convolution."""
        return _mixed(y_ARE, self.base_kernel[1], dynamic_AROG)


def around(conv: BlockConv | None, x_ARE: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `sublayer(x)`, between two convolutions if there are any."""
    if conv is None:
        return sublayer(x_ARE)
    inner_ARE, dynamic_AROG = conv(x_ARE)
    return conv.finish(sublayer(inner_ARE), dynamic_AROG)


def _mixed(x_ARE: Tensor, base_OE: Tensor, dynamic_AROG: Tensor) -> Tensor:
    """Return the sum over taps of a kernel times the row so many before; rows before the block are 0."""
    groups = dynamic_AROG.shape[-1]
    x_ARGC = x_ARE.unflatten(-1, (groups, -1))
    base_OGC = base_OE.to(x_ARE.dtype).unflatten(-1, (groups, -1))
    kernel_AROGC = base_OGC + dynamic_AROG[..., None].to(x_ARE.dtype)
    y_ARGC = kernel_AROGC[:, :, 0] * x_ARGC
    for tap in range(1, len(base_OGC)):
        y_ARGC = y_ARGC + kernel_AROGC[:, :, tap] * pad(x_ARGC[:, :-tap], (0, 0, 0, 0, tap, 0))
    return y_ARGC.flatten(-2)
