"""The reference target: a small Llama with its training forward, stored as a folder with int8 weights.

Shapes: T tokens of one packed sequence, E hidden dim, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.cache.base import Causal, Mask
from longtrain.cache.packed import PackedCapture
from longtrain.errors import ArtifactError, ConfigError
from longtrain.targets.attention import NAME, Pass
from longtrain.targets.stored.files import INT8_FILE

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a small Llama with tied embeddings.

    Args:
        vocab_size: entries of the tokenizer.
        hidden_size: E.
        n_layers: number of decoder layers.
        n_heads: H.
        n_kv_heads: G.
        head_dim: D; H x D need not be E.
        intermediate_size: width of the MLP.
        rope_base: rotary base.
        max_positions: context, tokens.
    """

    vocab_size: int = 4096
    hidden_size: int = 384
    n_layers: int = 6
    n_heads: int = 8
    n_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    rope_base: float = 500000.0
    max_positions: int = 16384


def build_llama(shape: LlamaShape, *, seed: int = 0) -> LlamaForCausalLM:
    """Build a trainable Llama in fp32; normal init, scaled by depth in projections to the residual stream.

    Raises:
        ConfigError: sizes that do not fit each other.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if shape.n_heads % shape.n_kv_heads or shape.head_dim % 2:
        raise ConfigError(
            f"n_heads={shape.n_heads} must be a multiple of n_kv_heads={shape.n_kv_heads}, "
            f"and head_dim={shape.head_dim} even"
        )
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=3,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).float()
    model.set_attn_implementation(NAME)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0.0, 0.02 / (2 * shape.n_layers) ** 0.5 if writes else 0.02, generator=rng)
    return model


class _TrainCapture(PackedCapture):
    """Runs attention in v's dtype: under autocast RoPE leaves q and k in fp32 while v is half."""

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        super().write(layer, k_BGTD.to(v_BGTD.dtype), v_BGTD)
        self._dtype = v_BGTD.dtype

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        return super().attend(layer, q_BHTD.to(self._dtype), mask=mask, scale=scale)


def packed_hidden(model: LlamaForCausalLM, ids_T: Tensor, pos_T: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """Return the final normed hidden states [T, E] of one packed sequence of documents, with gradients.

    Args:
        model: from `build_llama`.
        ids_T: token ids, int64.
        pos_T: positions, int64, restarting with each document.
        bounds: document bounds from 0 to T, on the host.
    """
    capture = _TrainCapture(bounds, layers=(), device=ids_T.device)
    out = model.model(
        input_ids=ids_T[None],
        position_ids=pos_T[None],
        use_cache=False,
        longtrain_pass=Pass(capture, Causal(), None),
    )
    return out.last_hidden_state[0]


def quantise_rows(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantise matrices to int8 with one fp32 scale a row (`name` and `name.scale`); vectors become bf16.

    The scale of a row is its largest magnitude over 127.
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        value = tensor.detach().float().cpu()
        if value.dim() == 1:
            packed[name] = value.to(torch.bfloat16)
            continue
        scale = value.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        packed[name] = (value / scale).round().clamp(-127, 127).to(torch.int8)
        packed[f"{name}.scale"] = scale
    return packed


def save_bundle(model: LlamaForCausalLM, tokenizer: Path, folder: Path) -> int:
    """Write the target folder: config, int8 weights, generation config, tokenizer.

    Args:
        model: the trained model.
        tokenizer: folder of its tokenizer.
        folder: made if missing.

    Returns:
        The size of the folder in bytes.

    Raises:
        ArtifactError: a tokenizer file is missing.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if not (tokenizer / name).is_file():
            raise ArtifactError(
                f"{tokenizer} has no {name}; train the tokenizer first: longtrain prepare +recipe=target_tiny"
            )
        shutil.copyfile(tokenizer / name, folder / name)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(quantise_rows(state), folder / INT8_FILE, metadata={"format": "pt"})
    (folder / INT8_FILE).chmod(0o644)
    ends = {key: getattr(model.config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", _config(model))
    _write_json(folder / "generation_config.json", ends)
    return sum(file.stat().st_size for file in folder.iterdir())


def _config(model: LlamaForCausalLM) -> dict[str, Any]:
    """Return the config in a form that any transformers version reads, without values of this process."""
    values = json.loads(model.config.to_json_string(use_diff=False))
    keep = (
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rope_parameters",
        "rms_norm_eps",
        "tie_word_embeddings",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
    )
    return {
        **{key: values[key] for key in keep if key in values},
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
    }


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
