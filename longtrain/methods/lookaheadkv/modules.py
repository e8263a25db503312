"""What LookaheadKV trains: soft tokens, and LoRA that only their rows pass through; those rows as a batch.

Shapes: P prompts, M lookahead tokens, N = P * M rows, E hidden dim, R LoRA rank, X outputs of a linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from longtrain.errors import TargetMismatchError
from longtrain.kernels.importance import Span
from longtrain.targets.suffix import GROUPS, LAST, LayerLora, Lora

if TYPE_CHECKING:
    from longtrain.methods.lookaheadkv.config import Config
    from longtrain.targets.info import TargetInfo

_Plan: TypeAlias = tuple[list[list[tuple[str, list[str]]]], list[Tensor], list[list[int]]]
"""Layer by layer the linears that share an input; all A and B in that order; how many are one piece."""
STD = 0.02
"""The spread of fresh soft tokens until the target's own embeddings are known."""


class LookaheadKV(nn.Module):
    """Trainable tensors only; they are fp32 in training, whatever the target computes in.

    The last layer gives nothing but scores, so its o, gate, up and down have no LoRA at all, and that of its
    v is held (in PEFT's names, as a buffer) but not trained.

    Args:
        config: hyperparameters.
        info: the target's shapes.

    Source: LookaheadKV §3.1; §4.1 for rank, scale and size.
    Note: initial values are not published. Soft tokens are normal with the spread of the target's embeddings,
        A is Kaiming-uniform and B zero, as in PEFT.
    """

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__()
        if info.hidden_act != "silu":
            raise TargetMismatchError(
                f"target {info.name} has the activation '{info.hidden_act}'; LookaheadKV is built for: silu"
            )
        self.scale = config.lora_alpha / config.lora_rank
        self.rank = config.lora_rank
        self._plan: _Plan | None = None
        self.fresh = True
        """False once weights were loaded: they must not be scaled then."""
        self.lookahead_embeddings = nn.Parameter(torch.empty(config.n_lookahead, info.hidden_size))
        nn.init.normal_(self.lookahead_embeddings, std=config.init_std or STD)
        names = [name for group in GROUPS.values() for name in group]
        wanted = {f"{short}_proj" for short in config.linears()}
        self.layers = nn.ModuleList()
        for index in range(info.n_layers):
            last = index == info.n_layers - 1
            layer = nn.Module()
            for name in names:
                part, leaf = name.split(".")
                if leaf not in wanted or (last and name not in GROUPS["qkv"]):
                    continue
                if part not in layer._modules:
                    layer.add_module(part, nn.Module())
                adapter = _Adapter(sizes(info)[name], config.lora_rank, trained=not last or name in LAST)
                layer.get_submodule(part).add_module(leaf, adapter)
            self.layers.append(layer)
        self.register_load_state_dict_post_hook(_loaded)

    def adapters(self, dtype: torch.dtype) -> list[LayerLora]:
        """The LoRA of each layer for `SuffixRun`, cast; gradients flow back into the parameters.

        All of them are cast in one piece, in which the A of linears that share an input are neighbours.
        """
        if self._plan is None:
            self._plan = self._planned()
        plan, tensors, counts = self._plan
        pieces = _cast(tensors, dtype, counts)
        made: list[LayerLora] = []
        for rows in plan:
            lora: dict[str, Lora] = {}
            for key, names in rows:
                a_XE = next(pieces)
                lora[key] = Lora(a_XE, {name: next(pieces) for name in names}, self.scale)
            made.append(lora)
        return made

    def _planned(self) -> _Plan:
        """What `adapters` needs of the modules: looking hundreds of them up takes the host milliseconds."""
        plan: list[list[tuple[str, list[str]]]] = []
        tensors: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            plan.append([])
            for key, group in GROUPS.items():
                used = {name: found for name in group if (found := _find(layer, name)) is not None}
                if index == len(self.layers) - 1:
                    used = {name: found for name, found in used.items() if name in LAST}
                if used:
                    plan[-1].append((key, list(used)))
                    tensors += [one.lora_A.weight for one in used.values()]
                    tensors += [one.lora_B.weight for one in used.values()]
        return plan, tensors, [[len(names)] + [1] * len(names) for rows in plan for _, names in rows]

    @torch.no_grad()
    def scale_embeddings(self, std: float) -> None:
        """Give fresh soft tokens the spread `std`."""
        self.lookahead_embeddings.mul_(std / STD)


class _Matrix(nn.Module):
    """One weight, trained or only held."""

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
    """Outputs and inputs of each linear of a decoder layer, by its Hugging Face name."""
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


def _find(layer: nn.Module, name: str) -> _Adapter | None:
    part, leaf = name.split(".")
    return getattr(getattr(layer, part, None), leaf, None)


def _cast(tensors: list[Tensor], dtype: torch.dtype, counts: list[list[int]]) -> Iterator[Tensor]:
    """The tensors in one flat copy of `dtype`, so many neighbours below each other in each piece."""
    if not tensors:
        return iter(())
    groups = tuple(n for group in counts for n in group)
    assert sum(groups) == len(tensors)
    return iter(_Cast.apply(dtype, groups, *tensors))


class _Cast(torch.autograd.Function):
    """Hundreds of small matrices in another type as one operator, and their gradients back as one.

    An autograd node for each of them would take the host longer than the device needs for a step's rows.
    """

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, groups: tuple[int, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.groups, ctx.sizes = groups, [(one.numel(), one.shape) for one in tensors]
        ctx.dtype = tensors[0].dtype
        ctx.set_materialize_grads(False)
        flat = torch.cat([one.reshape(-1) for one in tensors]).to(dtype)
        pieces, at, first = [], 0, 0
        for n in groups:
            size = sum(numel for numel, _ in ctx.sizes[first : first + n])
            columns = ctx.sizes[first][1][1]
            pieces.append(flat.as_strided((size // columns, columns), (columns, 1), at))
            at, first = at + size, first + n
        return tuple(pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = next(one for one in grads if one is not None)
        first, parts = 0, []
        for n, grad in zip(ctx.groups, grads, strict=True):
            size = sum(numel for numel, _ in ctx.sizes[first : first + n])
            parts.append(given.new_zeros(size) if grad is None else grad.reshape(-1))
            first += n
        flat = torch.cat(parts).to(ctx.dtype)
        found, at = [], 0
        for numel, (rows, columns) in ctx.sizes:
            found.append(flat.as_strided((rows, columns), (columns, 1), at))
            at += numel
        return None, None, *found


def _loaded(module: nn.Module, _incompatible: object) -> None:
    module.fresh = False  # type: ignore[assignment]


def lookahead_rows(
    module: LookaheadKV, keys: Sequence[tuple[int, int]], seqs: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Span]]:
    """Inputs, positions and spans for `SuffixRun`.

    Args:
        module: the lookahead tokens.
        keys: start and stop of each prompt in its sequence.
        seqs: the sequence of each.
        dtype: the type to compute in.

    Returns:
        embeds_NE; pos_N on the host, going on where each prompt ends; spans.
    """
    M, hidden = module.lookahead_embeddings.shape
    embeds_NE = module.lookahead_embeddings.to(dtype)[None].expand(len(keys), M, hidden).reshape(-1, hidden)
    pos_N = torch.cat([torch.arange(stop - start, stop - start + M) for start, stop in keys])
    rows = [(first, first + M) for first in range(0, len(keys) * M, M)]
    spans = [Span(row, seq, key) for row, seq, key in zip(rows, seqs, keys, strict=True)]
    return embeds_NE, pos_N, spans
