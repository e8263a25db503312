"""The parameters of LookaheadKV: lookahead embeddings, and LoRA that applies only to the lookahead tokens.

Shapes: P prompts, M lookahead tokens, N = P * M, L layers, E hidden dim or inputs of a linear, O outputs
of linears of one input, R LoRA rank times the number of those that have LoRA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longtrain.errors import TargetMismatchError
from longtrain.kernels.importance import Span
from longtrain.layers import Startable
from longtrain.targets.families import FAMILIES, family_of
from longtrain.targets.lora import Lora
from longtrain.targets.suffix import GROUPS, LAST

if TYPE_CHECKING:
    from longtrain.methods.lookaheadkv.config import Config
    from longtrain.targets.info import TargetInfo

STD = 0.02
"""Standard deviation of new lookahead embeddings until the target's own embeddings are known."""


class LookaheadKV(Startable):
    """Trainable tensors only; they are fp32 in training, whatever dtype the target computes in.

    Of the last layer that sees the whole text only the scores are needed, so its o, gate, up and down have no
    LoRA at all, and that of its v is stored (under PEFT's name, as a buffer) but not trained. Layers after it
    (with a window) have none.

    Args:
        config: hyperparameters.
        info: the target's shapes.

    Source: LookaheadKV §3.1; §4.1 for rank, scale and size.
    Note: initial values are not published. Embeddings are normal with the standard deviation of the target's,
        A is Kaiming-uniform and B zero, as in PEFT.
    """

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__()
        if not info.full_layers:
            info.require_full_layers("LookaheadKV")
        if not family_of(info.family).suffixes:
            raise TargetMismatchError(
                f"target {info.name} is of the family {info.family}; LookaheadKV is built for: "
                f"{', '.join(name for name, one in FAMILIES.items() if one.suffixes)}"
            )
        names = [name for group in GROUPS.values() for name in group]
        wanted = {f"{short}_proj" for short in config.linears()}
        if not info.swiglu and wanted & {"gate_proj", "up_proj", "down_proj"}:
            raise TargetMismatchError(
                f"target {info.name} has no gate, up and down of one MLP in every layer, and "
                f"method.lora_targets={config.lora_targets} puts LoRA on them; pass "
                "method.lora_targets=[q,k,v,o]"
            )
        self.scale = config.lora_alpha / config.lora_rank
        self.rank = config.lora_rank
        self._sizes = sizes(info)
        self._plan: tuple[list[_Group], list[Tensor]] | None = None
        self.lookahead_embeddings = nn.Parameter(torch.empty(config.n_lookahead, info.hidden_size))
        nn.init.normal_(self.lookahead_embeddings, std=config.init_std or STD)
        self.layers = nn.ModuleList()
        self._last = info.full_layers[-1]
        for index in range(info.n_layers):
            last = index == self._last
            layer = nn.Module()
            for name in names if index <= self._last else ():
                part, leaf = name.split(".")
                if leaf not in wanted or (last and name not in GROUPS["qkv"]):
                    continue
                if part not in layer._modules:
                    layer.add_module(part, nn.Module())
                adapter = _Adapter(self._sizes[name], config.lora_rank, trained=not last or name in LAST)
                layer.get_submodule(part).add_module(leaf, adapter)
            self.layers.append(layer)

    def adapters(self, dtype: torch.dtype) -> list[Lora]:
        """Return the LoRA for `SuffixRun`, cast and scaled; gradients flow back into the parameters."""
        if self._plan is None:
            self._plan = self._planned()
        groups, tensors = self._plan
        pieces = iter(_Cast.apply(dtype, self.scale, groups, *tensors) if tensors else ())
        return [Lora(group.key, group.layers, next(pieces), next(pieces)) for group in groups]

    def _planned(self) -> tuple[list[_Group], list[Tensor]]:
        """Collect the tensors for `adapters` once: looking up hundreds of modules takes milliseconds."""
        groups: list[_Group] = []
        tensors: list[Tensor] = []
        last = self._last
        for key, names in GROUPS.items():
            for layers, group in ((range(last), names), ((last,), LAST if key == "qkv" else ())):
                rows, at = [], 0
                for name in group:
                    if layers and _find(self.layers[layers[0]], name) is not None:
                        rows.append((name, slice(at, at + self._sizes[name][0])))
                    at += self._sizes[name][0]
                if rows:
                    groups.append(_Group(key, tuple(layers), at, tuple(place for _, place in rows)))
                    found = [[_find(self.layers[layer], name) for name, _ in rows] for layer in layers]
                    tensors += [one.lora_A.weight for of_layer in found for one in of_layer]
                    tensors += [of_layer[i].lora_B.weight for i in range(len(rows)) for of_layer in found]
        return groups, tensors

    @torch.no_grad()
    def scale_embeddings(self, std: float) -> None:
        """Rescale new lookahead embeddings to the standard deviation `std`."""
        self.lookahead_embeddings.mul_(std / STD)


class _Matrix(nn.Module):
    """One weight matrix, as a parameter or as a buffer."""

    weight: Tensor

    def __init__(self, rows: int, columns: int, trained: bool) -> None:
        super().__init__()
        weight = torch.empty(rows, columns)
        if trained:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)


class _Adapter(nn.Module):
    """A and B of one linear, under PEFT's names."""

    lora_A: _Matrix
    lora_B: _Matrix

    def __init__(self, size: tuple[int, int], rank: int, *, trained: bool) -> None:
        super().__init__()
        rows, columns = size
        self.lora_A, self.lora_B = _Matrix(rank, columns, trained), _Matrix(rows, rank, trained)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)


def sizes(info: TargetInfo) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each linear of a decoder layer, by its Hugging Face name."""
    hidden, inner = info.hidden_size, info.intermediate_size
    heads, kv = info.n_heads * info.head_dim, info.n_kv_heads * info.head_dim
    return {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _find(layer: nn.Module, name: str) -> Any:
    """Return the adapter of that linear, or None if it has none."""
    part, leaf = name.split(".")
    return getattr(getattr(layer, part, None), leaf, None)


@dataclass(frozen=True)
class _Group:
    """LoRA of linears that share an input, in all layers where the same linears have it.

    Args:
        key: a key of `GROUPS`.
        layers: those layers.
        outputs: O.
        rows: of each linear that has LoRA, its range in the outputs.
    """

    key: str
    layers: tuple[int, ...]
    outputs: int
    rows: tuple[slice, ...]

    def blocks(self, b_LOR: Tensor, rank: int) -> list[Tensor]:
        """Return the B of each linear, [L, out, rank], as views."""
        return [b_LOR[:, rows, i * rank : (i + 1) * rank] for i, rows in enumerate(self.rows)]


class _Cast(torch.autograd.Function):
    """Stacks hundreds of small matrices in another dtype, and splits the stacks' gradients again.

    One autograd node per matrix would take the host longer than the device needs for a step. The inputs are,
    group by group, the A layer by layer, then the B linear by linear; the outputs are a_LRE and b_LOR of each
    group.
    """

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, scale: float, groups: list[_Group], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.scale, ctx.groups, ctx.dtype, ctx.rank = scale, groups, tensors[0].dtype, len(tensors[0])
        given, stacks = iter(tensors), []
        for group in groups:
            L, linears = len(group.layers), len(group.rows)
            a = torch.cat([next(given) for _ in range(L * linears)]).to(dtype)
            # b is block-diagonal: a linear's outputs read only its own `rank` inputs
            b_LOR = a.new_zeros(L, group.outputs, ctx.rank * linears)
            for block in group.blocks(b_LOR, ctx.rank):
                block.copy_(torch.stack([next(given) for _ in range(L)]).mul_(scale))
            stacks += [a.view(L, -1, a.shape[1]), b_LOR]
        return tuple(stacks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        given, found = iter(grads), []
        for group in ctx.groups:
            d_a_LRE, d_b_LOR = (next(given).to(ctx.dtype) for _ in range(2))
            blocks = group.blocks(d_b_LOR, ctx.rank)
            found += [d_a_LRE.view(-1, ctx.rank, d_a_LRE.shape[-1]), *(block * ctx.scale for block in blocks)]
        return None, None, None, *chain.from_iterable(one.unbind() for one in found)


def lookahead_tokens_of(
    module: LookaheadKV, keys: Sequence[tuple[int, int]], seqs: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Span]]:
    """Build the inputs, positions and spans of the lookahead tokens for `SuffixRun`.

    Args:
        module: the lookahead tokens.
        keys: start and stop of each prompt in its sequence.
        seqs: the sequence of each prompt.
        dtype: dtype to compute in.

    Returns:
        embeds_NE; pos_N on the host, continuing after each prompt's end; spans.
    """
    M, hidden = module.lookahead_embeddings.shape
    embeds_NE = module.lookahead_embeddings.to(dtype)[None].expand(len(keys), M, hidden).reshape(-1, hidden)
    pos_N = torch.cat([torch.arange(stop - start, stop - start + M) for start, stop in keys])
    rows = [(first, first + M) for first in range(0, len(keys) * M, M)]
    spans = [Span(row, seq, key) for row, seq, key in zip(rows, seqs, keys, strict=True)]
    return embeds_NE, pos_N, spans
