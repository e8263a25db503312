"""The ends of a target of an unsupported family, or of whose weight files some are missing.

They are what training a draft on an engine's states needs: `config.json`, embeddings, final norm and LM head.
Norm and embeddings are transformers' own for the architecture (some add 1 to the norm's weight, or scale the
embeddings); the rest of its model is built on the meta device, without weights. A target of a supported
family has the facts of the whole one (`families.facts`), so that a draft attaches to that. In another family,
a plain Llama without layers replaces the rest of the model.

Shapes: E hidden dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from longtrain.costs.model import Sizes
from longtrain.errors import ArtifactError, ConfigError, TargetMismatchError, first_line
from longtrain.files import read_json
from longtrain.layers import shapes_alone
from longtrain.targets.at_hand import source_of
from longtrain.targets.config_file import eos_ids_of
from longtrain.targets.ends import TargetEnds
from longtrain.targets.families.facts import model_facts
from longtrain.targets.info import ROPE_TYPES, TargetInfo, check_supported, rope_values
from longtrain.targets.stored.checkpoint import PLAIN
from longtrain.targets.stored.files import StoredTensors, weight_files
from longtrain.targets.weights import identity, rebuild_buffers, sample

EMBEDDINGS, NORM, HEAD = "embed_tokens.weight", "norm.", "lm_head.weight"
SCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "logits_soft_cap")
"""Keys of configs whose models change the LM head's logits."""


class ForeignEnds(TargetEnds):
    """Ends of a target whose layers are not read."""

    @property
    def final_norm_weight(self) -> Tensor:
        """The factors [E] of the norm before the LM head."""
        return self.final_norm(torch.ones_like(self.embed_weight[:1]))[0]

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """Raise an error: the layers are not read (ConfigError)."""
        raise ConfigError(
            f"the layers of target {self.info.name} ({self.info.family}) are not read, and a warm start "
            "copies from them; pass method.start_mlp=random (EAGLE-3), or method.warm_start=false"
        )


def runs_here(folder: Path, config: Any) -> bool:
    """Return True if a target is supported and all its weight files are in the folder."""
    try:
        weight_files(folder)
    except ArtifactError:
        return False
    return _supported(config)


def _supported(config: Any) -> bool:
    try:
        check_supported(config, "")
    except TargetMismatchError:
        return False
    return True


def foreign_ends(
    folder: Path,
    config: Any,
    info: dict[str, Any],
    *,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    device: torch.device,
) -> ForeignEnds:
    """Read a target's embeddings, final norm and LM head.

    Args:
        folder: the target's folder; weight files that its index names may be missing.
        config: its transformers config.
        info: fields of `TargetInfo` that are known already.
        tokenizer: its tokenizer.
        dtype: dtype of weights and activations.
        device: the device to put them on.

    Raises:
        ArtifactError: a matrix is missing or damaged, or transformers builds no model of the config.
        TargetMismatchError: the model scales its logits, has another final norm, or a biased head.
    """
    where, config = info["name"], config.get_text_config()
    model, facts = _without_weights(config, dtype, where, context=info.get("max_positions"))
    norm = model.get_decoder().norm
    facts |= {"eos_ids": eos_ids_of(config, folder)} | info
    tensors = StoredTensors(folder, device, some=True)
    index = folder / "model.safetensors.index.json"
    places = read_json(index)["weight_map"] if index.is_file() else {name: "" for name in tensors}
    found: dict[str, Tensor] = {}

    def read(end: str, what: str, shape: torch.Size | tuple[int, ...]) -> str:
        """Read the tensor with the shortest name of this end, and return what comes before that."""
        name = min((name for name in places if name.endswith(end)), key=len, default="")
        if name not in tensors:
            advice = f"which is in {places[name]}; get that file too" if name else "get the folder again"
            raise ArtifactError(f"{folder} lacks the target's {what} ({end}), {advice}")
        found[end] = value = tensors.read(name)
        if value.dtype not in PLAIN or value.shape != shape:
            has = f"{tuple(value.shape)} as {value.dtype}"
            wants = f"{tuple(shape)} in bf16, fp16 or fp32"
            raise TargetMismatchError(
                f"{tensors.file_of[name]}: the {what} {name} is {has}; expected {wants}"
            )
        return name.removesuffix(end)

    table = (facts["vocab_size"], facts["hidden_size"])
    before = read(EMBEDDINGS, "embedding matrix", table)
    for leaf, weight in [*norm.named_parameters()]:
        read(f"{before}{NORM}{leaf}", "final norm", weight.shape)
        value = found[f"{before}{NORM}{leaf}"].to(device, dtype)
        setattr(norm, leaf, nn.Parameter(value, requires_grad=False))
    if not config.tie_word_embeddings or any(name.endswith(HEAD) for name in places):
        read(HEAD, "head matrix", table)
    extra = {"ends": identity({end: (one.shape, sample(one)) for end, one in found.items()}, {})}
    extra |= {"architecture": next(iter(config.architectures or ()), "")} | source_of(folder)
    made = TargetInfo(**facts, extra=extra)
    if not _supported(config):
        embed, model = model.get_input_embeddings(), _stand_in(made)
        model.model.norm, model.model.embed_tokens = norm, embed
    for module, end in ((model.model.embed_tokens, EMBEDDINGS), (model.lm_head, HEAD)):
        value = found.get(end, found[EMBEDDINGS]).to(device, dtype)
        module.weight = nn.Parameter(value, requires_grad=False)
    rebuild_buffers(model, device)
    return ForeignEnds(model, made, tokenizer, weights=lambda: iter(()))


def _without_weights(
    config: Any, dtype: torch.dtype, where: str, *, context: int | None
) -> tuple[Any, dict[str, Any]]:
    """Return the model on the meta device, and the facts that a draft takes from it.

    Args:
        config: the config of its text model.
        dtype: dtype of weights and activations.
        where: the target's name, for messages.
        context: most tokens of a text; None: those of the config.
    """
    try:
        with shapes_alone():
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
        body, context = model.get_decoder(), context or config.max_position_embeddings
        facts = model_facts(model, context) if _supported(config) else _foreign_facts(model, context)
    except Exception as error:
        raise ArtifactError(
            f"the config.json of target {where} describes no model that transformers can build, or lacks "
            f"what a draft takes from it ({type(error).__name__}: {first_line(error)})"
        ) from error
    scaled = [
        f"{key}={getattr(config, key)}" for key in SCALED if getattr(config, key, None) not in (None, 1)
    ]
    norm = getattr(body, "norm", None)
    if scaled or norm is None or model.get_output_embeddings().bias is not None:
        why = f"scales its logits ({scaled[0]})" if scaled else "has no model.norm, or a bias on its LM head"
        raise TargetMismatchError(
            f"target {where} ({config.model_type}) {why}; its logits are not known from an engine's states"
        )
    return model, facts


def _foreign_facts(model: Any, context: int) -> dict[str, Any]:
    """Return the facts of a model whose family is not supported; rotary parameters are for whole heads.

    Note: a draft's MLP has SiLU whatever the target has.
    """
    config = model.config
    facts = asdict(Sizes.of_keys(config.to_dict())) | {"rms_norm_eps": config.rms_norm_eps}
    query = next((module for module in model.get_decoder().modules() if hasattr(module, "q_proj")), None)
    return facts | {
        "family": config.model_type,
        "max_positions": context,
        "rope": _rope(config),
        "experts": facts["experts"] or {},
        "qk_norm": hasattr(query, "q_norm"),
        "attention_bias": getattr(getattr(query, "q_proj", None), "bias", None) is not None,
    }


def _rope(config: Any) -> dict[str, Any]:
    """Return rotary parameters for whole heads, of the layers with full attention if layers differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope and all(isinstance(one, Mapping) for one in rope.values()):
        rope = rope.get("full_attention") or next(iter(rope.values()))
    found = {key: value for key, value in rope_values(rope).items() if key != "partial_rotary_factor"}
    if found["rope_type"] not in ROPE_TYPES:
        found = {"rope_type": "default"}
    return {"rope_theta": float(rope.get("rope_theta") or 10000.0), **found}


def _stand_in(info: TargetInfo) -> Any:
    """Return a Llama without layers and without values."""
    config = LlamaConfig(
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        num_attention_heads=info.n_heads,
        head_dim=info.head_dim,
        num_hidden_layers=0,
        max_position_embeddings=info.max_positions,
        rope_parameters=dict(info.rope),
        tie_word_embeddings=False,
    )
    with shapes_alone():
        return LlamaForCausalLM(config)
