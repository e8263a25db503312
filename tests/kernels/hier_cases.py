"""Inputs of the quantiser's tests, for the twin, the interpreter and a GPU."""

import torch

from longtrain.kernels.hierarchical.layout import RING, Ring, Split, new_planes

NAMES = ("k_upper", "k_lower", "v_upper", "v_lower", "k_step", "k_zero", "v_step", "v_zero")


def planes_of(split: Split, *, layers=1, batch=2, heads=2, blocks=3, dim=64, device="cpu"):
    return new_planes(
        n_layers=layers,
        batch=batch,
        n_kv_heads=heads,
        blocks=blocks,
        head_dim=dim,
        split=split,
        device=device,
    )


def rows(*shape: int, seed: int = 0, dtype=torch.float32, device="cpu") -> torch.Tensor:
    """Keys as models have them: channels far from zero, constant and tiny ones, a token of outliers."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=gen) * 2 + torch.randn(shape[-1], generator=gen) * 20
    x[..., 3] = 0.0
    x[..., 5] = 7.25
    x[..., 9] = -1e-5 * torch.rand(shape[:-1], generator=gen)
    x[..., 11] *= 10
    x[..., 4, :] *= 15
    return x.to(dtype).to(device)


def ring_of(layers: int, batch: int, heads: int, dim: int, *, dtype=torch.float32, device="cpu") -> Ring:
    shape = (layers, batch, heads, RING, dim)
    return Ring(
        rows(*shape, seed=1, dtype=dtype, device=device), rows(*shape, seed=2, dtype=dtype, device=device)
    )


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as a hook sees them: tokens before heads in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def same(one, other) -> list[str]:
    """Names of the tensors that differ."""
    return [name for name in NAMES if not torch.equal(getattr(one, name), getattr(other, name))]
