"""The `MethodSpec` of LongSpec: module, objective, draft, and their costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from longtrain.costs.cycle import Forward
from longtrain.costs.method import CycleCost, MethodCost
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.costs.training import PackedSequence, StepCost, draft_step
from longtrain.decoding.roles import Parts
from longtrain.kernels.int4_linear import AT_ONCE, GROUPS
from longtrain.methods.checked import built_for_target, check_sizes, given_keys, running, trained
from longtrain.methods.longspec.config import Config, source_layer
from longtrain.methods.longspec.modules import LongSpecDraft
from longtrain.methods.longspec.objective import LongSpecObjective
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.methods.longspec.warm_start import warm_start
from longtrain.methods.spec import MethodSpec
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target

KEYS = ("head_bits",)

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
    """Build a draft with new weights."""
    if info is not None:
        source_layer(config, info)
    return built_for_target(LongSpecDraft)(config, info)


def _objective(module: nn.Module, target: Target | None, config: Config) -> LongSpecObjective:
    """Build the objective; a draft without loaded weights is initialised from the target."""
    draft, target = trained(LongSpecDraft, module, target)
    source_layer(config, target.info)
    if config.warm_start and draft.fresh:
        warm_start(draft, target, config)
    return LongSpecObjective(draft, target, config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """Return the draft for an engine."""
    draft, info = running(LongSpecDraft, module, target), target.info
    config = replace(config, **given_keys("LongSpec", keys, KEYS))
    check_sizes(
        "a LongSpec draft of (hidden size, query heads, KV heads, head dim)",
        (draft.input_layernorm.weight.numel(), *draft.self_attn.heads, draft.self_attn.head_dim),
        (info.hidden_size, info.n_heads, info.n_kv_heads, info.head_dim),
        info,
    )
    return Parts(draft=LongSpecRuntime(draft, target, config), name="longspec")


def _other_heads(config: Config, info: TargetInfo) -> list[dict[str, Any]]:
    """Return the inference keys of the 4-bit LM head that GPUs use by default, if there is one."""
    copied = config.copies_head(info.vocab_size, faster=True) and info.hidden_size % GROUPS[-1] == 0
    return [{"head_bits": 4}] if copied else []


def training(config: Config, size: Sizes, row: PackedSequence, trained: int, itemsize: int) -> StepCost:
    """Cost of a chunked training step; hidden states are read only for the KL objective.

    With offsets the target reads some sequences again at their original positions (`guard_every`).
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
    """Cost of a cycle: one draft layer with two attentions per depth, then the target over all nodes."""
    width = Width(8 * itemsize, 8 * itemsize)
    cross = 2 * size.hidden_size * size.n_heads * size.head_dim  # q and output of its cross-attention
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
        weight_bytes=float(itemsize * (size.layer + cross)) + copy,
    )


SPEC = MethodSpec(
    name="longspec",
    config=Config,
    paper="LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and Verification, "
    "arXiv 2502.17421",
    build=_build,
    objective=_objective,
    attach=_attach,
    inference_keys=KEYS,
    golden_others=_other_heads,
    elsewhere={"vLLM": IN_VLLM},
    cost=MethodCost(training=training, cycle=cycle),
)
