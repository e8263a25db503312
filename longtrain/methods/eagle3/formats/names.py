"""Names of tensors and files in the two formats that engines load."""

from __future__ import annotations

from pathlib import Path

from longtrain.methods.draft_folders import CONFIG, read_config
from longtrain.methods.eagle3.config import FORMATS

SPECULATORS, FLAT = NAMES = FORMATS
PREFIX = {SPECULATORS: "layers.0.", FLAT: "midlayer."}
"""The prefix of the layer's tensors."""
LAYER = ("input_layernorm", "hidden_norm", "self_attn", "post_attention_layernorm", "mlp")
"""Modules of the draft whose tensors have the layer's prefix in a folder."""
EMBEDDINGS = "embed_tokens.weight"
OLD_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
"""Names of the norms before `fc` that SGLang still reads."""
FLAT_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "LlamaEagle3ForCausalLM",
)
SPECULATORS_CLASS = "Eagle3DraftModel"


def outside(name: str, form: str) -> str:
    """Return a folder's name for a module's tensor."""
    return PREFIX[form] + name if name.partition(".")[0] in LAYER else name


def inside(name: str) -> str:
    """Return the module's name for a folder's tensor; ModelOpt's flat folders have the prefix `layers.0.`."""
    name = name.removeprefix("model.")
    for old, new in OLD_NORMS.items():
        name = name.replace(old, new)
    for prefix in PREFIX.values():
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def format_of(folder: Path) -> str | None:
    """Return the format of a folder, by its `config.json`; None if it holds no EAGLE-3 draft."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    config = read_config(folder)
    if "speculators_model_type" in config:
        return SPECULATORS if config["speculators_model_type"] == "eagle3" else None
    names = config.get("architectures")
    known = isinstance(names, list) and any(name in FLAT_ARCHITECTURES for name in names)
    return FLAT if known or "draft_vocab_size" in config else None
