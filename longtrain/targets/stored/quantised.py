"""Dequantises checkpoints whose weights are one product of values and scales; refuses all others by name.

Shapes: [rows, columns] of a linear's weight, [grid rows, grid columns] of its scales.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longtrain.errors import ArtifactError, TargetMismatchError, refusal

READ = "fp8 (weight_scale_inv or weight_scale), compressed-tensors with 8 bits, MXFP4"
"""Kinds of quantised checkpoints that are read, for messages."""

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "dense")
"""Formats of compressed-tensors that store a weight unpacked, beside its scales."""

SCALES = (".weight_scale_inv", ".weight_scale")
"""Endings of the names of a weight's scales."""

ACTIVATIONS = (".input_scale", ".activation_scale", ".output_scale", ".input_zero_point", ".k_scale",
               ".v_scale")  # fmt: skip
"""Scales of activations and caches, which a dequantised model does not use."""

MXFP4 = "mxfp4"
BLOCKS, EXPONENTS = "_blocks", "_scales"
"""Endings of the names of a weight's two tensors in MXFP4."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the numbers of 4 bits whose highest bit, the sign, is 0."""

_METHODS = {
    r"\.(SCB|weight_format)$": "bitsandbytes int8",
    r"\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)$": "bitsandbytes 4-bit (nf4, fp4)",
    r"\.(qweight|qzeros|scales|g_idx)$": "GPTQ or AWQ",
    r"_(blocks|scales)$": "MXFP4",
    r"\.(weight_(packed|shape|g_idx|global_scale)|bitmask)$": "compressed-tensors (packed)",
}
"""Endings of tensor names -> the method that writes them, if config.json does not state it."""

_NAMES = {"gptq": "GPTQ", "awq": "AWQ", "mxfp4": "MXFP4"}


@dataclass(frozen=True)
class Quantisation:
    """The quantisation that config.json states.

    Args:
        method: `quant_method`; empty: the weights are not quantised.
        blocks: sizes [rows, columns] of the blocks that share a scale, of each group of weights.
    """

    method: str = ""
    blocks: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Quantisation:
        """Read the quantisation from the values of a config.json.

        Args:
            config: the values.
            where: the target's name, for messages.

        Raises:
            ArtifactError: it is no quantization_config.
            TargetMismatchError: weights of this kind are not read.
        """
        values = config.get("quantization_config") or config.get("compression_config")
        if not values:
            return cls()
        if not isinstance(values, Mapping):
            raise ArtifactError(
                f"target {where}: config.json has quantization_config={values!r}; get it again"
            )
        method, refused = str(values.get("quant_method") or ""), ""
        if method == MXFP4:
            return cls(method)
        if method == "fp8":
            return cls(method, _pairs([values.get("weight_block_size")], where))
        if method == "compressed-tensors":
            refused = _not_read(values, where)
            if not refused:
                weights = [_object(group, "weights", where) for group in _groups(values, where)]
                return cls(method, _pairs([one.get("block_structure") for one in weights], where))
        elif method == "bitsandbytes" or "load_in_8bit" in values or "load_in_4bit" in values:
            kind = "int8" if values.get("load_in_8bit") else str(values.get("bnb_4bit_quant_type") or "4-bit")
            refused = f"bitsandbytes {kind}"
        else:
            bits = f" ({values['bits']} bits)" if values.get("bits") else ""
            refused = (
                f"{_NAMES.get(method, method) or 'a method that quantization_config does not name'}{bits}"
            )
        raise not_read(where, refused)


def of_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Expand experts in MXFP4: two numbers a byte, the lower half first; 32 numbers share a power of two.

    Args:
        blocks: uint8 [experts, outputs, groups, 16].
        exponents: uint8 [experts, outputs, groups], each 127 more than the power.

    Returns:
        The weights in bf16, which has all of these numbers, [experts, inputs, outputs].

    Source: `convert_moe_packed_tensors` of transformers; OCP Microscaling Formats 1.0, 5.3.
    """
    table = torch.tensor((*_FP4, *(-one for one in _FP4)), device=blocks.device)
    found = []
    for halves, powers in zip(blocks, exponents, strict=True):
        numbers = torch.stack((table[(halves & 15).int()], table[(halves >> 4).int()]), -1).flatten(-2)
        numbers = torch.ldexp(numbers, powers.int()[..., None] - 127)
        found.append(numbers.to(torch.bfloat16).flatten(1).t())
    return torch.stack(found)


def not_read(where: str, method: str) -> TargetMismatchError:
    """Build the error for a checkpoint that is quantised by a method that is not read."""
    return TargetMismatchError(
        f"target {where} is quantised with {method}, which is not read; of quantised checkpoints these "
        f"are: {READ}; pass the model as it was before, in bf16 or fp16"
    )


def method_of(name: str) -> str:
    """Return the unsupported method that stores a tensor of this name; empty if none is known."""
    return next((method for ends, method in _METHODS.items() if re.search(ends, name)), "")


@dataclass(frozen=True)
class Scales:
    """The scales of one weight.

    Args:
        values: the scales as they are stored.
        block: rows and columns of the weight that share one.
        inverse: True for `weight_scale_inv`: the product is in fp32. Others are multiplied in their dtype.
    """

    values: Tensor
    block: tuple[int, int]
    inverse: bool

    @classmethod
    def of(
        cls, name: str, values: Tensor, shape: Sequence[int], quantisation: Quantisation, *, inverse: bool
    ) -> Scales:
        """Match scales to a weight.

        Args:
            name: the weight's name.
            values: its scales: one, one for each row [rows, 1], or a grid of one for each block.
            shape: the weight's shape.
            quantisation: gives the block sizes; the last block of a row or column may be smaller.
            inverse: see `Scales`.

        Raises:
            ArtifactError: the weight is no matrix, or the scales are no grid over it.
        """
        if len(shape) != 2:
            raise ArtifactError(f"{name} has scales and shape {tuple(shape)}; only matrices have scales")
        if values.numel() == 1:
            return cls(values.reshape(1, 1), (shape[0], shape[1]), inverse)
        grid = tuple(values.shape)
        if grid == (shape[0], 1):
            return cls(values, (1, shape[1]), inverse)
        for block in quantisation.blocks:
            if grid == tuple(-(-size // each) for size, each in zip(shape, block, strict=True)):
                return cls(values, block, inverse)
        divides = len(grid) == 2 and not any(
            size % (count or size + 1) for size, count in zip(shape, grid, strict=True)
        )
        if quantisation.blocks or not divides:
            told = f" with blocks of {list(quantisation.blocks[0])}" if quantisation.blocks else ""
            said = f"{name} has shape {tuple(shape)} and scales of shape {grid}"
            raise refusal(ArtifactError, said, f"one scale, [{shape[0]}, 1], or a grid of blocks{told}")
        return cls(values, (shape[0] // grid[0], shape[1] // grid[1]), inverse)

    def dequantise(self, weight: Tensor, rows: slice, count: int) -> Tensor:
        """Multiply rows of a weight by their scales, as transformers does.

        Args:
            weight: the rows [len(rows), columns], fp8 or int8.
            rows: their range in the whole weight.
            count: number of rows of the whole weight.

        Source: `Fp8Dequantize` of transformers (fp32, its result rounded once) and `dequantize` of
            compressed-tensors (in the scales' dtype).
        """
        which = torch.arange(count, device=weight.device)[rows] // self.block[0]
        scale = _numbers(self.values).to(weight.device)
        scale = scale.float() if self.inverse else scale
        by_rows = scale[which]
        if scale.shape[1] > 1:
            by_rows = by_rows.repeat_interleave(self.block[1], 1)[:, : weight.shape[1]]
        return weight.to(scale.dtype) * by_rows


def _numbers(scales: Tensor) -> Tensor:
    """Return scales as numbers: stored bytes and `float8_e8m0fnu` are powers of two."""
    if scales.dtype == torch.uint8:
        return (scales.float() - 127.0).exp2()
    return scales.float() if scales.dtype.itemsize == 1 else scales


def _object(values: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Return a nested mapping of quantization_config; empty if it is not given."""
    found = values.get(key) or {}
    if not isinstance(found, Mapping):
        raise ArtifactError(
            f"target {where}: config.json has quantization_config with {key}={found!r}; get it again"
        )
    return found


def _groups(values: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    groups = _object(values, "config_groups", where)
    return [_object(groups, name, where) for name in groups]


def _not_read(values: Mapping[str, Any], where: str) -> str:
    """Return why weights of compressed-tensors are not read; empty if they are."""
    groups = _groups(values, where)
    for form in [values.get("format"), *(group.get("format") for group in groups)]:
        if form is not None and form not in FORMATS:
            return f"compressed-tensors ({form})"
    sparsity = _object(values, "sparsity_config", where).get("format") or "dense"
    if sparsity != "dense":
        return f"compressed-tensors ({sparsity})"
    if _object(values, "transform_config", where).get("config_groups"):
        return "compressed-tensors (transforms of weights and activations)"
    for bits in (_object(group, "weights", where).get("num_bits", 8) for group in groups):
        if bits != 8:
            return f"compressed-tensors with {bits} bits"
    return ""


def _pairs(found: Sequence[Any], where: str) -> tuple[tuple[int, int], ...]:
    """Return the block sizes that are pairs of rows and columns."""
    pairs = [one for one in found if isinstance(one, list) and len(one) == 2]
    for pair in pairs:
        if not all(type(size) is int and size > 0 for size in pair):
            said = f"target {where}: config.json has blocks of {pair} in quantization_config"
            raise refusal(ArtifactError, said, "two whole numbers above 0")
    return tuple((rows, columns) for rows, columns in pairs)
