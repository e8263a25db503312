"""Attention of a few new tokens over a long prefix, followed by their own keys under a tree mask.

Formula, for query i of sequence b: softmax over cache positions c < base + len_b and over the positions base
+ len_b + j of the new tokens j that it sees, of scale * q_i·k_c. A chain is a tree whose nodes see their
predecessors; without a mask only the prefix is read. With a window W a query sees, of these, the entries less
than W before it; a new token's place in the text is base + len_b + the number of its ancestors.

Lengths are not known on the host: `len_B` is on the device, so that one CUDA graph serves every length.
Triton on a GPU of compute capability 8.0 or more for head dims up to 256 in fp32, bf16 and fp16 (interpreted
under TRITON_INTERPRET=1 on any device, but not in bf16, which the interpreter cannot multiply); `reference`
everywhere else.

Products run in the dtype of the keys with fp32 sums, exponentials in fp32. On a GPU the results of a chain or
of a whole tree, up to 16 tokens over all sequences, are bit for bit those of plain decoding for each token.

Shapes: B batch, T new tokens, N tree nodes (N = T, or the tokens are some of them), S cache positions, H
query heads, G KV heads (H a multiple of G), D head dim, W 64-bit words of a token's mask.
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
"""Most nodes under a tree mask: two words of bits."""

_MAX_DIM = 256
"""Largest head dim of the Triton kernel."""

_WORD = 64


def tree_bits(visible_BTN: Tensor) -> Tensor:
    """Pack a tree's mask into bits: bit j of node i is set if node i sees node j.

    Args:
        visible_BTN: bool; the mask of all nodes, or of the last T of them.

    Returns:
        bits_BTW, int64, W = ceil(N / 64); bit j of a node is in word j // 64 at position j % 64.

    Raises:
        DataError: more than `MAX_NODES` nodes, or more tokens than nodes.
    """
    B, T, N = visible_BTN.shape
    if not 1 <= T <= N <= MAX_NODES:
        raise refusal(
            DataError, f"a tree mask of {T} x {N}", f"1 to {MAX_NODES} nodes, no more tokens than nodes"
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
    window: int = 0,
    depth_BT: Tensor | None = None,
    dropped_B: Tensor | None = None,
    first_BG: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of T new tokens over positions [0, base + len_B[b]) and their own T entries after them.

    Args:
        q_BHTD: queries after RoPE; last dim contiguous.
        k_BGSD: keys, likewise; positions from base + len_B[b] + T on are not read, nor, without a mask, those
            from base + len_B[b] on.
        v_BGSD: values, likewise.
        len_B: int32 or int64 on the keys' device, not written by the operator right before
            (`kernels.devices`). On a GPU base + len_B[b] + T <= S is not checked.
        mask: bits_BTW of `tree_bits`, the new tokens that each token sees; `CAUSAL`: token i sees tokens
            0..i; None: tokens see the prefix alone.
        scale: softmax scale, above 0.
        base: positions of the prefix that `len_B` does not count (nodes of a chain before the new tokens).
        nodes: N, if the new tokens are some of a tree's nodes and the keys of all N follow the prefix; None:
            T.
        splits: number of programs that the keys are divided among; None: as many as fill the GPU.
        window: keys that a token sees, its own included, by position: the number of its ancestors counts for
            a node, not its place. 0: all.
        depth_BT: int64, number of ancestors of each node; only with a window and a tree's mask.
        dropped_B: int64 like `len_B`, first positions of each sequence that are not stored, so that slot s
            has position dropped_B[b] + s; a multiple of `costs.model.TILE`, and before every token's window.
            The result has the bits of one over all positions. None: none; only with a window.
        first_BG: int64, where heads have different numbers of entries: keys and values are one buffer [S, D]
            of all heads, expanded to [B, G, S, D], position 0 of each sequence and KV head is at this row of
            it, and `len_B` is a length for each of them too, [B, G]. None: each has its own buffer. Not with
            a window.

    Returns:
        out_BHTD in q's dtype and the natural-log lse_BHT in fp32 (fp64 for fp64); 0 and -inf for a token that
        sees nothing.

    Raises:
        DataError: shapes, dtypes or a mask that do not fit.

    Source: LongSpec §3.3 (hybrid tree attention), as one split-KV kernel and a merge.
    """
    nodes = q_BHTD.shape[2] if nodes is None else nodes
    _check(q_BHTD, k_BGSD, v_BGSD, len_B, first_BG, mask, base, nodes)
    _check_window(mask, window, depth_BT, (len(q_BHTD), q_BHTD.shape[2]), nodes)
    if dropped_B is not None and (not window or dropped_B.shape != len_B.shape):
        found = f"dropped_B {tuple(dropped_B.shape)} with window={window}"
        raise refusal(DataError, found, f"{tuple(len_B.shape)}, and a window")
    if splits is not None and splits < 1:
        raise refusal(DataError, f"splits={splits}", "1 or more")
    if first_BG is not None and window:
        raise refusal(DataError, f"window={window} with first_BG", "window=0, since positions are unknown")
    if not kernel_serves(q_BHTD, k_BGSD, v_BGSD):
        return reference.tree_attention(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            len_B if dropped_B is None else len_B - dropped_B,
            mask,
            scale=scale,
            base=base,
            nodes=nodes,
            window=window,
            depth_BT=depth_BT,
            first_BG=first_BG,
        )
    from longtrain.kernels.tree_attention import launch

    return launch.tree_attention(
        q_BHTD,
        k_BGSD,
        v_BGSD,
        len_B,
        mask,
        scale,
        base,
        splits,
        nodes=nodes,
        window=window,
        depth_BT=depth_BT,
        dropped_B=dropped_B,
        first_BG=first_BG,
    )


def kernel_serves(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> bool:
    """True if the Triton kernel supports these tensors; else the reference implementation is used."""
    return products_serve(q_BHTD, k_BGSD) and v_BGSD.stride(-1) == 1 and k_BGSD.shape[-1] <= _MAX_DIM


def _check(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    len_B: Tensor,
    first_BG: Tensor | None,
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
            "one batch, one head dim, 1 or more tokens, query heads a multiple of KV heads",
        )
    if v_BGSD.shape != k_BGSD.shape or v_BGSD.dtype != k_BGSD.dtype:
        raise refusal(
            DataError,
            f"values {tuple(v_BGSD.shape)} of {v_BGSD.dtype} beside keys {tuple(k_BGSD.shape)} of "
            f"{k_BGSD.dtype}",
            "the keys' shape and dtype",
        )
    counts = (B,) if first_BG is None else (B, G)
    if len_B.shape != counts or len_B.dtype not in (torch.int32, torch.int64):
        raise refusal(DataError, f"len_B {tuple(len_B.shape)} of {len_B.dtype}", f"{counts}, int32 or int64")
    if first_BG is not None and (first_BG.shape, first_BG.stride()) != (counts, len_B.stride()):
        raise refusal(DataError, f"first_BG {tuple(first_BG.shape)}", f"{counts} with the lengths' strides")
    tail = 0 if mask is None else nodes
    if base < 0 or base + tail > S:
        raise refusal(
            DataError, f"base={base} and {tail} new tokens in {S} slots", f"0 <= base <= {S - tail}"
        )
    if nodes != T and not isinstance(mask, Tensor):
        raise refusal(DataError, f"{T} tokens of {nodes} nodes without a tree mask", "bits of `tree_bits`")
    check_mask(mask, B, T, nodes)


def _check_window(
    mask: Tensor | Causal | None, window: int, depth_BT: Tensor | None, shape: tuple[int, int], nodes: int
) -> None:
    """Refuse a window without what gives each token its position."""
    if window == 0:
        return
    if window < 0 or mask is None or nodes != shape[1]:
        raise refusal(
            DataError,
            f"window={window} with {shape[1]} tokens of {nodes} nodes and "
            f"{'no mask' if mask is None else 'a mask'}",
            "0 or more, and a mask of all new tokens",
        )
    if isinstance(mask, Tensor) and (depth_BT is None or depth_BT.shape != shape):
        found = None if depth_BT is None else tuple(depth_BT.shape)
        raise refusal(DataError, f"a window over a tree with depths {found}", f"depth_BT of {shape}")


def check_mask(mask: Tensor | Causal | None, B: int, T: int, nodes: int | None = None) -> None:
    """Refuse a tree mask that does not fit B trees of T nodes.

    Args:
        mask: see `tree_attention`.
        B: number of trees.
        T: number of new tokens.
        nodes: number of nodes of a tree; None: T.

    Raises:
        DataError: wrong size or dtype, or too many nodes.
    """
    if not isinstance(mask, Tensor):
        return
    nodes = T if nodes is None else nodes
    if nodes > MAX_NODES:
        raise refusal(DataError, f"a tree of {nodes} nodes", f"1 to {MAX_NODES} (a chain: mask=CAUSAL)")
    outputs = (B, T, -(-nodes // _WORD))
    if mask.shape != outputs or mask.dtype != torch.int64:
        raise refusal(
            DataError, f"tree mask {tuple(mask.shape)} of {mask.dtype}", f"{outputs}, int64, see tree_bits"
        )
