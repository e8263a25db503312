"""A target without its layers: embeddings, final norm, LM head and rotary, for training on stored features.

Shapes: T tokens of a packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longtrain.errors import ArtifactError, ConfigError, TargetMismatchError
from longtrain.targets.model import Target
from longtrain.targets.weights import random_tensor, sample, tensors_of, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from longtrain.targets.info import TargetInfo
    from longtrain.targets.step import PackedStep

Weights = Callable[[], Iterator[tuple[str, Callable[[], Tensor]]]]
"""Goes through all weights: the name of each, and what gives its values."""

LAYERS = "model.layers."
"""How the names of the layers' weights begin."""


class TargetEnds(Target):
    """A target that embeds, rotates and has an LM head, but cannot run.

    Args:
        model: its layers are on the meta device.
        info: facts about the whole target.
        tokenizer: its tokenizer, if any.
        weights: where single layers are read, or drawn anew, when they are asked for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        info: TargetInfo,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        weights: Weights,
    ) -> None:
        super().__init__(model, info, tokenizer)
        self._weights = weights

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """Weights of a decoder layer, read or drawn now."""
        prefix = f"{LAYERS}{layer}."
        return {
            name.removeprefix(prefix): read().to(self.device, self.dtype)
            for name, read in self._weights()
            if name.startswith(prefix)
        }

    def packed(self, *args: Any, **kwargs: Any) -> PackedStep:
        """Refused.

        Raises:
            ConfigError: always.
        """
        raise self._cannot_run()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            ConfigError: always.
        """
        raise self._cannot_run()

    def _cannot_run(self) -> ConfigError:
        return ConfigError(
            f"target {self.info.name} was loaded without its layers (features=offline) and cannot run; pass "
            "features=online or features=fill"
        )


def stored_weights(folder: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Name of each weight of a folder, and what reads it.

    Raises:
        ArtifactError: a file is missing, truncated or unreadable.
    """
    for file in weight_files(folder):
        for name, stored in tensors_of(file, torch.device("cpu")):
            yield name, partial(stored.rows, slice(None))


def drawn_weights(
    shapes: Mapping[str, torch.Size], seed: int, *, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The same of random weights (`weights.random_weights`)."""
    for name, shape in shapes.items():
        yield name, partial(random_tensor, name, shape, seed=seed, dtype=dtype, device=device)


def assign_ends(
    model: nn.Module, weights: Weights, *, dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[torch.Size, bytes]]:
    """Fill all of a model on the meta device but its layers; every tensor's shape and sample come back.

    Raises:
        ArtifactError: a file is missing, truncated or unreadable, or a tensor is missing.
        TargetMismatchError: a tensor's shape is not the config's.
    """
    shapes = {name: param.shape for name, param in model.named_parameters()}
    samples: dict[str, tuple[torch.Size, bytes]] = {}
    for name, read in weights():
        if name not in shapes:
            continue  # rotary buffers of old checkpoints, a tied head
        tensor = read()
        if tensor.shape != shapes[name]:
            raise TargetMismatchError(
                f"{name} has shape {tuple(tensor.shape)}, config.json says {tuple(shapes[name])}"
            )
        samples[name] = tensor.shape, sample(tensor, dtype)
        if not name.startswith(LAYERS):
            owner, _, leaf = name.rpartition(".")
            value = nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False)
            setattr(model.get_submodule(owner), leaf, value)
    if missing := sorted(set(shapes) - set(samples)):
        raise ArtifactError(
            f"the target lacks {len(missing)} tensors, the first is {missing[0]}; get its folder again"
        )
    return samples
