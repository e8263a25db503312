"""The `MethodSpec` of DSpark: how to build, train and run it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from longtrain.costs.method import MethodCost
from longtrain.data.config import DataConfig
from longtrain.data.packing.prepared import Prepared
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.methods.checked import built_for_target, check_sizes, given_keys, running, trained
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.conv import check_groups
from longtrain.methods.dspark.cost import cycle, training
from longtrain.methods.dspark.formats import FORMATS
from longtrain.methods.dspark.level import level_factors
from longtrain.methods.dspark.mask_token import check_mask_token, choose_mask_token
from longtrain.methods.dspark.modules import UNCHOSEN, DSparkDraft
from longtrain.methods.dspark.objective import DSparkObjective
from longtrain.methods.dspark.runtime import DSparkRuntime
from longtrain.methods.spec import MethodSpec
from longtrain.methods.vocabulary import check_attached, check_vocabulary, from_data
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target

KEYS = ("min_confidence",)


def _objective(module: nn.Module, target: Target | None, config: Config) -> DSparkObjective:
    """Build the objective; a new draft chooses its mask token and measures the target's channels."""
    draft, target = trained(DSparkDraft, module, target)
    new, ids_K = int(draft.mask_id) == UNCHOSEN, draft.draft_ids_K
    choose_mask_token(draft, target, config)
    if new and draft.factor_N is not None:
        draft.factor_N.copy_(level_factors(target, draft.read))
    if draft.lm_head is not None and ids_K is not None:
        if new:
            with torch.no_grad():
                draft.lm_head.weight.copy_(target.head_weight[ids_K.to(target.device)])
        else:
            check_vocabulary(ids_K, target.info)
    return DSparkObjective(draft, target, config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """Return the draft for an engine."""
    draft, info = running(DSparkDraft, module, target), target.info
    config = replace(config, **given_keys("DSpark", keys, KEYS))
    _check_keys_read(config, info)
    vocabulary = info.vocab_size if draft.path_head is None else draft.path_head.vocab_size
    check_sizes(
        "a DSpark draft of (hidden size, size of the target's states, head dim, vocabulary)",
        (
            draft.fc.out_features,
            draft.fc.in_features // len(draft.read),
            draft.block_layer(0).self_attn.head_dim,
            vocabulary,
        ),
        (info.hidden_size, info.hidden_size, config.head_dim or info.head_dim, info.vocab_size),
        info,
    )
    if draft.draft_ids_K is not None:
        check_attached(draft.draft_ids_K, info, "a DSpark draft")
    choose_mask_token(draft, target, config)
    return Parts(draft=DSparkRuntime(draft, target, config), name="dspark")


def _from_data(module: nn.Module, config: Config, info: TargetInfo, data: Prepared) -> dict[str, Any]:
    """Choose a new draft's vocabulary, if it has one of its own (`methods.vocabulary`)."""
    return from_data(module, config, info, data) if config.draft_vocab_size else {}


def _check_data(config: Config, data: DataConfig) -> None:
    """Refuse documents that are too short for a whole block."""
    shortest = min((stage.doc_tokens for stage in data.stages), default=0)
    if 0 < shortest < config.block_size + 2:
        raise ConfigError(
            f"data.stages doc_tokens={shortest} with method.block_size={config.block_size}: a block begins "
            f"at a document's second token at the earliest; pass doc_tokens={config.block_size + 2} or more"
        )


def _check_target(config: Config, info: TargetInfo) -> None:
    """Refuse heads that attention or RoPE cannot have, and tokens that the target lacks."""
    heads, groups = config.n_heads or info.n_heads, config.n_kv_heads or info.n_kv_heads
    if heads % groups:
        raise ConfigError(
            f"method.n_heads={heads} is no multiple of the {groups} KV heads (method.n_kv_heads={groups}); "
            "each KV head serves as many query heads"
        )
    if config.head_dim % 2:
        raise ConfigError(f"method.head_dim={config.head_dim}; RoPE allows even numbers, or 0: the target's")
    if config.candidates > info.vocab_size:
        raise ConfigError(
            f"method.selector_top={config.candidates} candidates of a slot; target {info.name} has "
            f"{info.vocab_size} tokens; pass {info.vocab_size} or less"
        )
    if config.conv_taps:
        check_groups(config.conv_group, info.hidden_size)
    _check_keys_read(config, info)
    check_mask_token(config, info)


def _check_keys_read(config: Config, info: TargetInfo) -> None:
    """Refuse to read the keys and values of a target that has no layer for it."""
    if config.target_kv and not info.readable_layers:
        raise ConfigError(
            f"method.target_kv=true; target {info.name} has no layer that sees the whole text with the "
            "rotary embedding of the draft; pass method.target_kv=false"
        )


SPEC = MethodSpec(
    name="dspark",
    config=Config,
    paper="DSpark, arXiv 2607.05147 (with heads=none and sample_from_anchor=false DFlash, arXiv 2602.06036; "
    "with heads=selector and conv_taps=2 DFlash2)",
    build=built_for_target(DSparkDraft),
    objective=_objective,
    formats=FORMATS,
    attach=_attach,
    inference_keys=KEYS,
    check_data=_check_data,
    check_target=_check_target,
    from_data=_from_data,
    cost=MethodCost(training=training, cycle=cycle, suite="training"),
)
