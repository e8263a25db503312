"""Writes the module in the format of `peft` for other tools; longtrain itself never reads these files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from longtrain.files import as_json
from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.modules import sizes
from longtrain.targets.info import TargetInfo

FOLDER = "peft"
PREFIX = "base_model.model.model."
EMBEDDINGS = "lookahead_embeddings"


def peft_files(tensors: Mapping[str, Tensor], config: Config, info: TargetInfo) -> dict[str, bytes]:
    """Return the files by their path in the artifact's folder.

    `adapter_config.json` and `adapter_model.safetensors` are a LoRA that `peft` loads (if there is any):
    every layer has all of its target modules, zeros where nothing is trained. It is meant
    for the lookahead tokens alone; merged into the model it would change what every token computes.
    `lookahead_embeddings.safetensors` has the soft tokens, `longtrain_eviction.json` the settings for using
    them.

    Args:
        tensors: the module's state, by name.
        config: hyperparameters.
        info: the target it was trained for.
    """
    use = {
        "lora": bool(config.linears()),
        "n": config.n_lookahead,
        "pool": "max",
        "kernel": config.pool_kernel,
        "reduction": config.reduction,
        "suffix_window": config.suffix_window,
        "base_model": info.name,
        "base_sha": info.weights_hash,
        "query_aware": config.response == "answer",
    }
    files: dict[str, bytes] = {
        "lookahead_embeddings.safetensors": save({EMBEDDINGS: tensors[EMBEDDINGS].contiguous()}),
        "longtrain_eviction.json": as_json(use),
    }
    if wanted := [f"{name}_proj" for name in config.linears()]:
        files["adapter_config.json"] = as_json(_adapter_config(wanted, config, info))
        files["adapter_model.safetensors"] = save(
            _adapter(tensors, wanted, config, info), metadata={"format": "pt"}
        )
    return {f"{FOLDER}/{name}": content for name, content in files.items()}


def _adapter(
    tensors: Mapping[str, Tensor], wanted: list[str], config: Config, info: TargetInfo
) -> dict[str, Tensor]:
    like = tensors[EMBEDDINGS]
    made: dict[str, Tensor] = {}
    for layer in range(info.n_layers):
        for linear, (rows, columns) in sizes(info).items():
            if linear.rpartition(".")[2] not in wanted:
                continue
            for half, shape in (("A", (config.lora_rank, columns)), ("B", (rows, config.lora_rank))):
                name = f"layers.{layer}.{linear}.lora_{half}.weight"
                made[PREFIX + name] = tensors.get(name, torch.zeros(shape, dtype=like.dtype)).contiguous()
    return made


def _adapter_config(wanted: list[str], config: Config, info: TargetInfo) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": info.name,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": wanted,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
