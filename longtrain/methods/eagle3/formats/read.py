"""Reads EAGLE-3 drafts trained by speculators, SpecForge, EAGLE, ModelOpt, AngelSlim or longtrain.

A missing key takes the format's documented default. If engines disagree about a default, the folder alone
does not determine what was trained, and `trained_by` must be given.

Shapes: E hidden dim, K tokens of the draft's vocabulary, V of the target's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from longtrain.errors import ArtifactError
from longtrain.layers import shapes_alone
from longtrain.log import get_logger
from longtrain.methods.draft_folders import CONFIG, matching, read_config, read_tensors
from longtrain.methods.eagle3.config import Config, draft_vocab
from longtrain.methods.eagle3.formats.names import FLAT, SPECULATORS, format_of, inside
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.folder_keys import (
    Keys,
    LayerInputs,
    LayerOutputs,
    building,
    described_layer,
    layer_sizes,
    sketch_of,
    trainer_of,
)
from longtrain.methods.spec import Imported
from longtrain.methods.vocabulary import IDS, MARKS, OFFSETS, read_vocabulary
from longtrain.settings import Count, CountOrZero
from longtrain.targets.info import TargetSketch
from longtrain.targets.rotary import Rotary

log = get_logger(__name__)

Json = dict[str, Any]

TRAINERS = ("longtrain", "speculators", "specforge", "eagle", "modelopt", "angelslim")
"""Known trainers, the values of `trained_by=`."""
LEFT_OUT = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of a folder that are not part of the draft."""
DEPTHS = 7
LEAST_WINDOW = 3
"""Smallest `sliding_window` read: the token itself and two before it."""


def read_folder(folder: Path, trained_by: str | None) -> Imported:
    """Read the draft in a folder of either format.

    Args:
        folder: the folder with `config.json` and the tensors.
        trained_by: one of `TRAINERS`; None: the trainer that the folder states, if any.

    Raises:
        ConfigError: the trainer is unknown.
        ArtifactError: the folder is damaged, holds another kind of draft, or is ambiguous without
            `trained_by`.
    """
    form, raw = format_of(folder), read_config(folder)
    if form is None:
        raise ArtifactError(
            f"{folder / CONFIG} describes no EAGLE-3 draft; allowed: {SPECULATORS}, {FLAT} folders"
        )
    keys = FolderKeys.of(folder, form, raw, trained_by)
    with building(keys.raw):
        config = keys.config()
        sketch = keys.sketch(config)
        expected = expected_shapes(config, sketch)
        Rotary(sketch.rope, head_dim=sketch.head_dim, max_positions=sketch.max_positions)
    tensors = _checked(folder, config, sketch, expected, read_tensors(folder))
    about = {"format": form, "trained_by": keys.trainer or "not stated", "folder": folder.name}
    return Imported(dataclasses.asdict(config), tensors, sketch, about)


@dataclasses.dataclass(frozen=True)
class FolderKeys:
    """Interprets the keys of one folder.

    Args:
        folder: the folder, for messages.
        form: its format.
        raw: its `config.json`.
        layer: the keys that describe the layer: `raw`, or a part of it.
        trainer: the trainer; None: unknown.
    """

    folder: Path
    form: str
    raw: Keys
    layer: Keys
    trainer: str | None

    @classmethod
    def of(cls, folder: Path, form: str, values: Json, trained_by: str | None) -> FolderKeys:
        """Read the keys of a folder.

        Raises:
            ConfigError: `trained_by` is not a known trainer.
            ArtifactError: the folder names an unknown trainer, or does not describe its layer.
        """
        raw = Keys(folder / CONFIG, values)
        trainer = trainer_of(raw, trained_by, TRAINERS)
        return cls(folder, form, raw, described_layer(raw, form == SPECULATORS), trainer)

    def config(self) -> Config:
        """Return the hyperparameters."""
        raw, layer = self.raw, self.layer
        if layer.get("num_hidden_layers", Count, 1) != 1:
            raise layer.wrong("num_hidden_layers", "1")
        if layer.get("mlp_bias", bool, False):
            raise layer.wrong("mlp_bias", "false")
        vocab = layer.get("vocab_size", Count)
        size = raw.get("draft_vocab_size", Count, vocab)
        window = self.window()
        return Config(
            layers=self.layers(),
            draft_vocab_size=0 if size == vocab else size,
            depths=DEPTHS if not window else max(1, min(DEPTHS, window - 1)),
            fc_norm=raw.get("fc_norm", bool, False) or raw.get("use_aux_norm", bool, False),
            norm_output=self.norm_output(),
            norm_before_fc=self.eagle().get("norm_before_fc", bool, raw.get("norm_before_fc", bool, False)),
            norm_before_residual=self.norm_before_residual(),
            window=window,
            attention_bias=layer.get("attention_bias", bool, False),
            qk_norm=layer.get("model_type", str, "") == "qwen3"
            or any("Qwen3" in name for name in raw.get("architectures", list[str], [])),
            **layer_sizes(raw, layer),
            own_embeddings=raw.get("embed_requires_grad", bool, False),
        )

    def sketch(self, config: Config) -> TargetSketch:
        """Return the target's sizes as stated in the folder."""
        return sketch_of(
            self.raw,
            self.layer,
            config,
            n_layers=max(config.layers) + 1 if config.layers else 8,
            qk_norm=config.qk_norm,
            bias=config.attention_bias,
            positions=2048,
        )

    def layers(self) -> list[int] | None:
        """Return the target layers whose outputs are read; None: the default of all engines."""
        key = "eagle_aux_hidden_state_layer_ids"
        inputs = (self.raw if self.raw.has(key) else self.layer).get(key, LayerInputs | None)
        outputs = self.eagle().get(key, LayerOutputs | None)
        if inputs is not None and outputs is not None and [one - 1 for one in inputs] != outputs:
            raise self.raw.error(
                f"eagle_aux_hidden_state_layer_ids={inputs} counts inputs of layers, eagle_config has "
                f"{outputs}, which counts outputs: they must differ by one; allowed: "
                f"{[one - 1 for one in inputs]} there"
            )
        if inputs is not None:
            return [one - 1 for one in inputs]
        if outputs is not None and self.trainer is None:
            raise self.raw.error(
                f"layer ids {outputs} stand in eagle_config alone: SGLang reads them as outputs of "
                "layers, vLLM as inputs; say who trained it, trained_by=specforge (outputs), or add the "
                "top-level key"
            )
        return outputs

    def norm_before_residual(self) -> bool:
        """Return True if the residual stream begins with the normed feature."""
        if self.raw.has("norm_before_residual") or self.form == FLAT:
            return self.raw.get("norm_before_residual", bool, False)
        if self.trainer != "speculators":
            raise self.raw.error(
                "norm_before_residual is missing: vLLM takes true, the speculators class false; say who "
                "trained it, trained_by=speculators (true), or add the key"
            )
        return True

    def norm_output(self) -> bool:
        """Return True if the next depth reads the normed state; SpecForge's trainer never did (its #879)."""
        said = self.raw.get("norm_output", bool, False)
        if self.trainer != "specforge":
            return said
        if self.raw.has("norm_output") and not said:
            raise self.raw.error(
                "norm_output=false of SpecForge trains without a norm before the head, and no engine "
                "decodes so; train it again with SpecForge after its change 879"
            )
        if said:
            log.warning(
                "folder=%s norm_output=true is read as false: SpecForge did not train it", self.folder
            )
        return False

    def window(self) -> int:
        """Return the window: previous tokens that are attended to; engines count the token itself too."""
        layer = self.layer
        slides = "sliding_attention" in layer.get("layer_types", list[str], [])
        size = layer.get("sliding_window", CountOrZero, 0)
        if slides and not size:
            raise layer.error("layer_types says sliding_attention and sliding_window is missing")
        if slides and size < LEAST_WINDOW:
            raise layer.wrong("sliding_window", f"{LEAST_WINDOW} or more: it counts the token itself")
        if layer.get("use_sliding_window", bool, False) and size and not slides:
            raise layer.error(
                f"use_sliding_window=true and sliding_window={size} without layer_types: engines differ "
                'in what they make of it; add layer_types=["sliding_attention"]'
            )
        return size - 1 if slides else 0

    def eagle(self) -> Keys:
        """Return `eagle_config`; empty if it is missing."""
        return (self.layer if self.layer.has("eagle_config") else self.raw).part("eagle_config")


def expected_shapes(config: Config, sketch: TargetSketch) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the module that a configuration describes.

    Raises:
        TargetMismatchError: the sizes are inconsistent.
    """
    with shapes_alone():
        module = Eagle3Draft(config, sketch)
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _checked(
    folder: Path,
    config: Config,
    sketch: TargetSketch,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Check that all of the module's tensors are present with the right shapes, and return them."""
    size = draft_vocab(config, sketch.vocab_size)
    tensors = {IDS: read_vocabulary(found, size=size, whole=sketch.vocab_size, where=folder)}
    named = []
    for outer, tensor in found.items():
        name = inside(outer)
        if name in (OFFSETS, MARKS, *LEFT_OUT) or name.endswith("rotary_emb.inv_freq"):
            continue
        if name == "embed_tokens.weight" and not config.own_embeddings:
            continue  # a copy of the target's
        if name == "self_attn.o_proj.bias" and not tensor.any():
            continue
        named.append((outer, name, tensor))
    tensors |= matching(folder, {key: expected[key] for key in expected if key != IDS}, named)
    return {name: tensors[name] for name in expected}
