"""A target without its layers: embeddings, final norm, LM head and rotary, for training on stored features.

Shapes: T tokens of a packed sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longtrain.errors import ConfigError
from longtrain.targets.families import plain_norm
from longtrain.targets.model import Target
from longtrain.targets.stored.checkpoint import StoredWeight
from longtrain.targets.weights import check_shape, random_tensor, refuse_missing, sample, stored_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from longtrain.targets.info import TargetInfo
    from longtrain.targets.step import PackedStep

Weights = Callable[[], Iterator[tuple[str, StoredWeight]]]
"""Iterates over all weights: the name of each, and a reader of its values."""

LAYERS = "model.layers."
"""Prefix of the names of the layers' weights."""


class TargetEnds(Target):
    """A target that embeds, rotates and has an LM head, but cannot run.

    Args:
        model: a model whose layers are on the meta device.
        info: facts about the whole target.
        tokenizer: its tokenizer, if any.
        weights: source from which single layers are read, or drawn anew, on request.
    """

    runs = False

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
        """Return the weights of a decoder layer, read or drawn on the spot."""
        prefix = f"{LAYERS}{layer}."
        return {
            (leaf := name.removeprefix(prefix)): plain_norm(
                self.family, leaf, stored.rows(slice(None)).to(self.device, self.dtype)
            )
            for name, stored in self._weights()
            if name.startswith(prefix)
        }

    def packed(self, *args: Any, **kwargs: Any) -> PackedStep:
        """Raise an error: there are no layers (ConfigError)."""
        raise self._cannot_run()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: there are no layers (ConfigError)."""
        raise self._cannot_run()

    def _cannot_run(self) -> ConfigError:
        return ConfigError(
            f"target {self.info.name} was loaded without its layers (features=offline or engine) and cannot "
            "run; pass features=online or features=fill"
        )


def drawn_weights(
    shapes: Mapping[str, torch.Size], seed: int, *, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, StoredWeight]]:
    """Yield the name of each random weight (`weights.random_weights`), and a function that draws it."""

    def draw(name: str, rows: slice) -> Tensor:
        return random_tensor(name, shapes[name], seed=seed, dtype=dtype, device=device)[rows]

    for name, shape in shapes.items():
        yield name, StoredWeight(name, Path("random weights"), tuple(shape), partial(draw, name))


def assign_ends(
    model: nn.Module, weights: Weights, folder: Path, *, dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[torch.Size, bytes]]:
    """Fill all of a model on the meta device except its layers; return every tensor's shape and sample.

    Raises:
        ArtifactError: a file is damaged, a tensor is missing, or the model has none of its name.
        TargetMismatchError: a tensor's shape is not the config's.
    """
    shapes = {name: value.shape for name, value in stored_values(model)}
    samples: dict[str, tuple[torch.Size, bytes]] = {}
    for name, stored in weights():
        check_shape(name, stored, shapes)
        tensor = stored.rows(slice(None))
        samples[name] = shapes[name], sample(tensor)
        if not name.startswith(LAYERS):
            owner, _, leaf = name.rpartition(".")
            value = nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False)
            setattr(model.get_submodule(owner), leaf, value)
    refuse_missing(set(shapes) - set(samples), folder)
    return samples
