"""What the rest of the toolkit knows of LongSpec: module, objective, draft, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from longtrain.costs.cycle import Forward
from longtrain.costs.method import CycleCost, MethodCost
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.costs.training import PackedRow, StepCost, draft_step
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.kernels.int4_linear import AT_ONCE, GROUPS
from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.modules import LongSpecDraft
from longtrain.methods.longspec.objective import LongSpecObjective
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.methods.longspec.warm_start import warm_start
from longtrain.methods.spec import MethodSpec, fitted
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target

IN_VLLM = """The class in `longtrain/integrations/longspec_vllm.py`, one file without longtrain, reads it.
FOLDER is a copy of this folder on the machine (of one on the Hub the path that `hf download` prints):

```python
LLM(
    model="TARGET",
    speculative_config={
        "method": "custom_class",
        "model": "longtrain.integrations.longspec_vllm.LongSpecProposer",  # or where you copied it to
        "num_speculative_tokens": 4,
    },
    additional_config={"longspec": "FOLDER"},
    enforce_eager=True,
)
```"""


def _build(config: Config, info: TargetInfo | None) -> nn.Module:
    """A draft with fresh weights."""
    if info is None:
        raise TargetMismatchError("a LongSpec draft is built for a target; pass target.path")
    _check_layer(config, info)
    return LongSpecDraft(config, info)


def _objective(module: nn.Module, target: Target | None, config: Config) -> LongSpecObjective:
    """The objective; a draft whose weights were not loaded from anywhere begins with the target's."""
    if target is None or not isinstance(module, LongSpecDraft):
        raise TargetMismatchError("LongSpec trains a LongSpec draft against a target; pass target.path")
    _check_layer(config, target.info)
    if config.warm_start and module.fresh:
        warm_start(module, target, config)
    return LongSpecObjective(module, target, config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """The draft for an engine, in the target's dtype and on its device (a copy where they differ)."""
    if not isinstance(module, LongSpecDraft):
        raise TargetMismatchError(f"LongSpec runs a LongSpec draft, not {type(module).__name__}")
    if others := set(keys) - {"head_bits"}:
        raise ConfigError(f"LongSpec takes the inference key head_bits; got: {', '.join(sorted(others))}")
    info, attention = target.info, module.self_attn
    own = (module.input_layernorm.weight.numel(), *attention.heads, attention.head_dim)
    if own != (needed := (info.hidden_size, info.n_heads, info.n_kv_heads, info.head_dim)):
        raise TargetMismatchError(
            f"a LongSpec draft of (hidden size, query heads, KV heads, head dim) = {own}; target {info.name} "
            f"has {needed}"
        )
    config = replace(config, **keys)
    module = fitted(module, target)
    return Parts(draft=LongSpecRuntime(module, target, config), name="longspec")


def _check_layer(config: Config, info: TargetInfo) -> None:
    if not -info.n_layers <= config.kv_source_layer < info.n_layers:
        raise ConfigError(
            f"method.kv_source_layer={config.kv_source_layer}; target {info.name} allows "
            f"{-info.n_layers}..{info.n_layers - 1}"
        )


def _other_heads(config: Config, info: TargetInfo) -> list[dict[str, Any]]:
    """The LM head as GPUs read it by default: a copy in 4 bits, where there is one."""
    copied = config.copies_head(info.vocab_size, faster=True) and info.hidden_size % GROUPS[-1] == 0
    return [{"head_bits": 4}] if copied else []


def training(config: Config, size: Sizes, row: PackedRow, trained: int, itemsize: int) -> StepCost:
    """A step in chunks; hidden states are read for the KL objective alone.

    With offsets the target reads some rows once more at their own positions (`guard_every`).
    """
    return draft_step(
        size,
        row,
        trained=trained,
        itemsize=itemsize,
        kl=config.objective == "kl",
        chunk_tokens=config.chunk_tokens,
        window=config.window,
        guard=config.anchor_offset and config.guard_every > 0,
    )


def cycle(config: Config, size: Sizes, widths: tuple[int, ...], itemsize: int) -> CycleCost:
    """A layer with two attentions a level, then the target over all nodes; a GPU's default of `head_bits`."""
    width = Width(8 * itemsize, 8 * itemsize)
    cross = 2 * size.hidden_size * size.n_heads * size.head_dim  # queries and output of its cross-attention
    above = (1, *widths[:-1])
    copied = config.copies_head(size.vocab_size, faster=itemsize == 2)
    copy = size.head * (4 + 32 / GROUPS[0]) / 8 if copied else 0.0
    less = size.head - round(copy / itemsize) if copied else 0  # weights that reading the copy saves

    def draft(rows: int) -> Forward:
        narrow = config.head_bits == 4 or rows <= AT_ONCE
        return Forward(width, rows=rows, layers=1, more_weights=cross - less if narrow else cross)

    return CycleCost(
        title="LongSpec",
        alone=Forward(width),
        draft=tuple(draft(rows) for rows in above),
        verify=Forward(width, rows=1 + sum(widths)),
        weight_bytes=float(itemsize * (size.weights // size.n_layers + cross)) + copy,
    )


SPEC = MethodSpec(
    name="longspec",
    config=Config,
    paper="LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and Verification, "
    "arXiv 2502.17421",
    build=_build,
    objective=_objective,
    attach=_attach,
    inference_keys=("head_bits",),
    golden_others=_other_heads,
    elsewhere={"vLLM": IN_VLLM},
    cost=MethodCost(training=training, cycle=cycle),
)
