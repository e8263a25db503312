"""Building blocks of modules: RMSNorm, rotary, grouped-query projections, SwiGLU; all take any leading dims.

Shapes: ... leading dims (tokens, or batch and tokens), E hidden dim, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from torch.overrides import TorchFunctionMode

from longtrain.kernels.fused_layer import rotated

Rope = tuple[Tensor, Tensor]
"""cos and sin, each [..., D], as returned by the target's own rotary module."""


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dim, computed in fp32 (fp64 stays fp64), returned in x's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of `x`."""
        if x.dtype == self.weight.dtype:  # the operator itself computes in fp32 or wider
            with torch.autocast(x.device.type, enabled=False):
                return rms_norm(x, self.weight.shape, self.weight, self.eps)
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            return rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


class _Unfilled(TorchFunctionMode):
    """Leaves out the functions of `torch.nn.init` where a tensor is on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Modules that are built in this context have parameters on the meta device: shapes without values.

    On that device random numbers take far longer than on a CPU, and give nothing, so none are drawn.
    """
    with torch.device("meta"), _Unfilled():
        yield


class Startable(nn.Module):
    """A module whose new weights may be given a start; `fresh` is False once weights were loaded into it."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh = True
        self.register_load_state_dict_post_hook(_loaded)


def _loaded(module: nn.Module, _incompatible: object) -> None:
    module.fresh = False  # type: ignore[assignment]


class GroupedQuery(nn.Module):
    """Projections of a grouped-query attention; the caller computes the attention itself.

    Args:
        hidden: E.
        heads: H and G.
        head_dim: D; H * D need not be E.
        bias: biases on q, k and v (Qwen2); the output never has one.
        qk_norm: RMSNorm on each head of q and k before RoPE (Qwen3).
        eps: epsilon of those norms.
        own_keys: False leaves out k and v (cross-attention to keys and values computed elsewhere).
        outputs: size of the output; None: E.
        neighbours: RoPE pairs dims 2i and 2i + 1 of a head, as in the target.
    """

    def __init__(
        self,
        hidden: int,
        heads: tuple[int, int],
        *,
        head_dim: int,
        bias: bool = False,
        qk_norm: bool = False,
        eps: float = 1e-6,
        own_keys: bool = True,
        outputs: int | None = None,
        neighbours: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.neighbours = heads, head_dim, neighbours
        n_heads, n_kv = heads
        self.q_proj = nn.Linear(hidden, n_heads * head_dim, bias=bias)
        if own_keys:
            self.k_proj = nn.Linear(hidden, n_kv * head_dim, bias=bias)
            self.v_proj = nn.Linear(hidden, n_kv * head_dim, bias=bias)
        self.o_proj = nn.Linear(n_heads * head_dim, outputs or hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm and own_keys else None

    def query(self, x: Tensor, rope: Rope) -> Tensor:
        """Return rotated queries, [..., H, D], of hidden states [..., E]."""
        q = self.q_proj(x).unflatten(-1, (self.heads[0], self.head_dim))
        q = q if self.q_norm is None else self.q_norm(q)
        return rotated(q, rope, neighbours=self.neighbours)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values, each [..., G, D], of hidden states [..., E]."""
        k = self.k_proj(x).unflatten(-1, (self.heads[1], self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.heads[1], self.head_dim))
        k = k if self.k_norm is None else self.k_norm(k)
        return rotated(k, rope, neighbours=self.neighbours), v

    def output(self, mixed: Tensor) -> Tensor:
        """Project attention output [..., H, D] to [..., E]."""
        return self.o_proj(mixed.flatten(-2))


class SwiGLU(nn.Module):
    """Gated MLP, `down(silu(gate(x)) * up(x))`, whatever activation the target has."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., E] to [..., E]."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


@contextmanager
def exact_products() -> Iterator[None]:
    """Context manager that computes fp32 matrix products in full fp32, without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def cast_to(weight: Tensor, x: Tensor) -> Tensor:
    """Cast a tensor of the target to the dtype of a module's weight, unless autocast does so."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(weight.dtype)
