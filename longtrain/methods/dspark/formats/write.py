"""Writes a draft as a folder of either format, and refuses settings that engines would silently ignore.

Source: the classes and loaders of speculators 0.9.0, vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

import longtrain
from longtrain.errors import ConfigError
from longtrain.methods.draft_folders import SPECULATORS_VERSION, TRAINER, layer_keys, speculators_config
from longtrain.methods.dspark.config import SELECTOR, Config, draft_vocab, layers_of
from longtrain.methods.dspark.formats.names import (
    DFLASH,
    DFLASH2,
    DSPARK,
    FILL_IN,
    FLAT,
    OPTIONS,
    SPECULATORS,
)
from longtrain.methods.vocabulary import IDS, vocabulary_map

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo

Json = dict[str, Any]
MASK = "mask_id"


def draft_of_heads(config: Config) -> str:
    """Return the kind of folder that a draft needs."""
    return {"none": DFLASH, SELECTOR: DFLASH2}.get(config.heads, DSPARK)


def window_key(form: str, window: int) -> int:
    """Return `sliding_window` for a layer that sees so many tokens before the block.

    In vLLM and SGLang a slot counts itself; the class of speculators counts the tokens before the block.
    """
    return window + 1 if form == FLAT else window


def refuse(form: str, config: Config, info: TargetInfo | None) -> None:
    """Refuse settings that engines reading a format would ignore, or read otherwise (`Formats.refuse`).

    Raises:
        ConfigError: the format cannot express the draft's settings.
    """
    if config.heads == "none" and config.sample_from_anchor:
        raise ConfigError(
            f"format={form}: without a Markov head engines read a draft as DFlash, whose anchor predicts "
            "nothing (method.heads=none with method.sample_from_anchor=true); train with "
            "sample_from_anchor=false, or with heads=markov"
        )
    selects = config.heads == SELECTOR
    if selects != bool(config.conv_taps) or (selects and config.sample_from_anchor):
        raise ConfigError(
            f"format={form}: engines have convolutions and a selector in DFlash2 alone, with both and an "
            f"anchor that predicts nothing (method.conv_taps={config.conv_taps}, heads={config.heads}, "
            f"sample_from_anchor={str(config.sample_from_anchor).lower()}); train with conv_taps=2 "
            "heads=selector sample_from_anchor=false, or serve it with longtrain"
        )
    if selects and form == SPECULATORS:
        raise ConfigError(
            "format=speculators: not checked in vLLM for DFlash2 (method.heads=selector); use "
            "format=flat, which vLLM and SGLang read"
        )
    if config.target_kv:
        raise ConfigError(
            f"format={form}: no engine has layers that read the target's keys and values "
            "(method.target_kv=true); train with false, or serve it with longtrain"
        )
    windows = sorted({one for one in config.layer_windows if one is not None})
    if len(windows) > 1:
        raise ConfigError(
            f"format={form}: all layers with a window share one key, and method.windows has {windows}; train "
            "with one size (null where a layer sees everything), or serve it with longtrain"
        )
    least = config.rows - 1 if form == FLAT else config.rows
    if windows and windows[0] < least:
        raise ConfigError(
            f"format={form}: engines count a block's own tokens in the window, so method.windows="
            f"{windows[0]} would hide parts of a block of {config.rows}; train with {least} or more"
        )
    if config.draft_vocab_size and form == FLAT:
        raise ConfigError(
            "format=flat: SGLang has no LM head of the draft's own, only the target's over all tokens "
            f"(method.draft_vocab_size={config.draft_vocab_size}); use format=speculators and vLLM, or train "
            "with method.draft_vocab_size=0"
        )
    if info is not None and config.draft_vocab_size >= info.vocab_size:
        raise ConfigError(
            f"format={form}: speculators takes an LM head over all tokens for a copy of the target's, and "
            f"method.draft_vocab_size={config.draft_vocab_size} is no part of {info.vocab_size}; train with "
            "fewer, or with 0: the target's head"
        )


def folder_tensors(tensors: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Return the module's tensors under the names that engines expect, all its own; the mask token is a key.

    Args:
        tensors: the module's state, by name.
        vocab_size: tokens of the target.
    """
    found = {name: part for name, part in tensors.items() if name not in (MASK, IDS)}
    if IDS in tensors:
        found |= vocabulary_map(tensors[IDS], vocab_size)
    return {name: part.detach().cpu().contiguous() for name, part in found.items()}


def folder_config(
    config: Config, info: TargetInfo, *, form: str, mask: int, dtype: str, trained_tokens: int | None
) -> Json:
    """Return a format's `config.json`; every key is written, since defaults differ among engines."""
    draft, outputs = draft_of_heads(config), list(layers_of(config, info.n_layers))
    inputs = [layer + 1 for layer in outputs]
    layer = _layer_config(config, info, form=form, positions=max(trained_tokens or 0, info.max_positions))
    heads = {} if draft in FILL_IN else _heads(config)
    own: Json = {"dtype": dtype, "torch_dtype": dtype, "tie_word_embeddings": False}
    own |= {"trained_by": TRAINER, "longtrain": longtrain.__version__}
    own |= {} if trained_tokens is None else {"trained_max_tokens": trained_tokens}
    if form == SPECULATORS:
        return {
            "architectures": ["DFlashDraftModel" if draft == DFLASH else "DSparkDraftModel"],
            "speculators_model_type": draft,
            "speculators_version": SPECULATORS_VERSION,
            "transformer_layer_config": layer,
            "draft_vocab_size": draft_vocab(config, info.vocab_size),
            "block_size": config.rows,
            "aux_hidden_state_layer_ids": inputs,
            "mask_token_id": mask,
            "sample_from_anchor": config.sample_from_anchor,
            "sliding_window_non_causal": True,
            **heads,
            "speculators_config": speculators_config(draft, info, config.block_size),
            **own,
        }
    shared = {
        "target_layer_ids": outputs,
        "mask_token_id": mask,
        # a DFlash block counts its anchor, a DSpark block the tokens that it drafts
        "block_size": config.rows if draft in FILL_IN else config.block_size,
        "num_target_layers": info.n_layers,
    }
    values = (config.conv_taps, config.conv_group, config.markov_rank, config.selector_top)
    options = dict(zip(OPTIONS, values, strict=True)) if draft == DFLASH2 else {}
    architectures = {DFLASH: "DFlashDraftModel", DFLASH2: "DFlash2DraftModel", DSPARK: "Qwen3DSparkModel"}
    return {
        "architectures": [architectures[draft]],
        **layer,
        **shared,
        "eagle_aux_hidden_state_layer_ids": inputs,
        "sample_from_anchor": config.sample_from_anchor,
        **heads,
        "dflash_config": {**shared, **options, "causal": False},
        **own,
    }


def _heads(config: Config) -> Json:
    confident = config.heads == "markov_confidence"
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident,
    }


def _layer_config(config: Config, info: TargetInfo, *, form: str, positions: int) -> Json:
    """Return transformers' keys that describe the layers; `is_causal` concerns the rows of a block."""
    windows = config.layer_windows
    window = next((window_key(form, one) for one in windows if one is not None), None)
    return {
        "model_type": "qwen3",
        **layer_keys(config, info, positions=positions),
        "num_hidden_layers": config.n_layers,
        "attention_bias": False,
        "layer_types": ["full_attention" if one is None else "sliding_attention" for one in windows],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": config.n_layers,
        "is_causal": False,
    }
