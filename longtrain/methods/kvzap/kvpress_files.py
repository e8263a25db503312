"""Writes the module in the form of kvpress's `KVzapModel`; longtrain itself never reads these files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import save
from torch import Tensor

from longtrain.files import as_json
from longtrain.methods.kvzap.config import Config
from longtrain.targets.info import TargetInfo

FOLDER = "kvpress"


def kvpress_files(tensors: Mapping[str, Tensor], config: Config, info: TargetInfo) -> dict[str, bytes]:
    """Return what `KVzapModel.from_pretrained` loads, as path in the artifact's folder -> content.

    kvpress scores no layers with a sliding window, but its model has layers for them: zeros here.

    Args:
        tensors: the module's state, by name; kvpress uses the same names.
        config: hyperparameters.
        info: the target it was trained for.
    """
    dtypes = {tensor.dtype for tensor in tensors.values()}
    assert len(dtypes) == 1
    about = {
        "architectures": ["KVzapModel"],
        "model_type": "kvzap",
        "input_dim": info.hidden_size,
        "output_dim": info.n_kv_heads,
        "hidden_dim": config.hidden_dim or None,
        "n_modules": info.n_layers,
        "dtype": str(dtypes.pop()).removeprefix("torch."),
    }
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    like = f"layers.{info.full_layers[0]}."
    for layer in {*range(info.n_layers)} - {*info.full_layers}:
        plain |= {
            name.replace(like, f"layers.{layer}."): torch.zeros_like(tensor)
            for name, tensor in tensors.items()
            if name.startswith(like)
        }
    return {
        f"{FOLDER}/config.json": as_json(about),
        f"{FOLDER}/model.safetensors": save(plain, metadata={"format": "pt"}),
    }
