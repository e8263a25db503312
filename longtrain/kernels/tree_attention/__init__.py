"""Attention of a few new rows over a long prefix and, right behind it, their own keys under a tree mask.

Formula, for query row i of sequence b: softmax over slots c < base + len_b and over the slots
base + len_b + j of the new rows j that it sees, of scale * q_i·k_c. A chain is a tree whose rows see their
predecessors; without a mask only the prefix is read.
Nothing of the length is known to the host: `len_B` lies on the device, so that one CUDA graph serves every
length. Triton on a GPU of compute capability 8.0 or more for head dims up to 128 in fp32, bf16 and fp16
(interpreted under TRITON_INTERPRET=1 on any device, but not in bf16, which the interpreter cannot multiply);
`tree_attention_reference` everywhere else.
Products run in the dtype of the keys with fp32 sums, exponentials in fp32. On a GPU the rows of a chain,
or of a whole tree, up to 16 over all sequences, have the bits that plain decoding computes for each of them.
Shapes: B batch, T new rows, N tree nodes (N = T, or the rows are some of them), S slots, H query heads,
G KV heads (H a multiple of G), D head dim, W 64-bit words of a row's mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.devices import products_serve, runs_on
from longtrain.kernels.tree_attention import reference
from longtrain.kernels.tree_attention.reference import CAUSAL, Causal

__all__ = ["CAUSAL", "MAX_NODES", "Causal", "tree_attention", "tree_bits"]

MAX_NODES = 128
"""Most rows under a tree mask: two words of bits."""

_MAX_DIM = 128
"""Largest head dim of the Triton kernel."""

_WORD = 64


def tree_bits(visible_BTN: Tensor) -> Tensor:
    """A tree's mask as bits: bit j of row i is set if node i sees node j.

    Args:
        visible_BTN: bool; the rows of all nodes, or of the last T of them.

    Returns: bits_BTW, int64, W = ceil(N / 64); bit j of a row lies in word j // 64 at position j % 64.

    Raises:
        DataError: more than `MAX_NODES` nodes, or more rows than nodes.
    """
    B, T, N = visible_BTN.shape
    if not 1 <= T <= N <= MAX_NODES:
        raise refusal(
            DataError, f"a tree mask of {T} x {N}", f"1 to {MAX_NODES} nodes, no more rows than nodes"
        )
    if runs_on(visible_BTN.device):
        from longtrain.kernels.tree_attention import launch

        return launch.tree_bits(visible_BTN)
    words = -(-N // _WORD)
    padded = torch.nn.functional.pad(visible_BTN, (0, words * _WORD - N)).view(B, T, words, _WORD)
    return (padded.long() << torch.arange(_WORD, device=padded.device)).sum(-1)


def tree_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    len_B: Tensor,
    mask: Tensor | Causal | None,
    *,
    scale: float,
    base: int = 0,
    splits: int | None = None,
    nodes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of T rows over slots [0, base + len_B[b]) and the T slots behind them.

    Args:
        q_BHTD: queries, rotated; any strides but 1 in the last dim.
        k_BGSD: keys, likewise; slots from base + len_B[b] + T on are not read, nor are those from
            base + len_B[b] on without a mask.
        v_BGSD: values, likewise.
        len_B: int32 or int64 on the keys' device, not written by the operator right before
            (`kernels.devices`). Nothing checks on a GPU that base + len_B[b] + T <= S.
        mask: bits_BTW of `tree_bits`, which of their own keys rows see; `CAUSAL`: row i sees rows 0..i;
            None: rows see the prefix alone.
        scale: softmax scale, above 0.
        base: slots of the prefix that `len_B` does not count (nodes of a chain in front of the rows).
        nodes: N, where the rows are some of a tree's nodes and the keys of all N lie behind the prefix;
            None: T.
        splits: parts that the keys are cut into, each a program; None: what fills the GPU.

    Returns:
        out_BHTD in q's dtype and the natural-log lse_BHT in fp32 (fp64 for fp64); 0 and -inf for a row that
        sees nothing.

    Raises:
        DataError: shapes, dtypes or a mask that do not fit.

    Source: LongSpec §3.3 (hybrid tree attention), as one split-KV kernel and a merge.
    """
    nodes = q_BHTD.shape[2] if nodes is None else nodes
    _check(q_BHTD, k_BGSD, v_BGSD, len_B, mask, base, nodes)
    if splits is not None and splits < 1:
        raise refusal(DataError, f"splits={splits}", "1 or more")
    if not kernel_serves(q_BHTD, k_BGSD, v_BGSD):
        return reference.tree_attention(
            q_BHTD, k_BGSD, v_BGSD, len_B, mask, scale=scale, base=base, nodes=nodes
        )
    from longtrain.kernels.tree_attention import launch

    return launch.tree_attention(q_BHTD, k_BGSD, v_BGSD, len_B, mask, scale, base, splits, nodes=nodes)


def kernel_serves(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> bool:
    """Whether the Triton kernel takes these tensors; the reference does otherwise."""
    return products_serve(q_BHTD, k_BGSD) and v_BGSD.stride(-1) == 1 and k_BGSD.shape[-1] <= _MAX_DIM


def _check(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    len_B: Tensor,
    mask: Tensor | Causal | None,
    base: int,
    nodes: int,
) -> None:
    B, H, T, D = q_BHTD.shape
    batch, G, S, width = k_BGSD.shape
    if width != D or H % G or batch != B or T < 1:
        raise refusal(
            DataError,
            f"queries {tuple(q_BHTD.shape)}, keys {tuple(k_BGSD.shape)}",
            "one batch, one head dim, 1 or more rows, query heads a multiple of KV heads",
        )
    if v_BGSD.shape != k_BGSD.shape or v_BGSD.dtype != k_BGSD.dtype:
        raise refusal(
            DataError,
            f"values {tuple(v_BGSD.shape)} of {v_BGSD.dtype} beside keys {tuple(k_BGSD.shape)} of "
            f"{k_BGSD.dtype}",
            "the keys' shape and dtype",
        )
    if len_B.shape != (B,) or len_B.dtype not in (torch.int32, torch.int64):
        raise refusal(DataError, f"len_B {tuple(len_B.shape)} of {len_B.dtype}", f"{(B,)}, int32 or int64")
    tail = 0 if mask is None else nodes
    if base < 0 or base + tail > S:
        raise refusal(DataError, f"base={base} and {tail} new rows in {S} slots", f"0 <= base <= {S - tail}")
    if nodes != T and not isinstance(mask, Tensor):
        raise refusal(DataError, f"{T} rows of {nodes} nodes without a tree mask", "the bits of `tree_bits`")
    check_mask(mask, B, T, nodes)


def check_mask(mask: Tensor | Causal | None, B: int, T: int, nodes: int | None = None) -> None:
    """Refuse a tree mask that is none of T rows of B trees.

    Args:
        mask: see `tree_attention`.
        B: trees.
        T: rows.
        nodes: nodes of a tree; None: T.

    Raises:
        DataError: its size or dtype, or too many nodes.
    """
    if not isinstance(mask, Tensor):
        return
    nodes = T if nodes is None else nodes
    if nodes > MAX_NODES:
        raise refusal(DataError, f"a tree of {nodes} nodes", f"1 to {MAX_NODES} (a chain: mask=CAUSAL)")
    want = (B, T, -(-nodes // _WORD))
    if mask.shape != want or mask.dtype != torch.int64:
        raise refusal(
            DataError, f"tree mask {tuple(mask.shape)} of {mask.dtype}", f"{want}, int64, see tree_bits"
        )
