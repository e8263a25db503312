"""An EAGLE-3 draft out of a folder that anybody trained: speculators, SpecForge, EAGLE, ModelOpt, longtrain.

A key that is missing takes the format's documented default. Where engines disagree about a default, the
folder does not say what was trained, and only `trained_by` can.

Shapes: E hidden dim, K tokens of the draft's vocabulary, V of the target's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtrain.errors import ArtifactError, ConfigError
from longtrain.log import get_logger
from longtrain.methods.eagle3.config import Config, draft_vocab
from longtrain.methods.eagle3.formats.names import (
    CONFIG,
    FLAT,
    IDS,
    MASK,
    OFFSETS,
    SPECULATORS,
    format_of,
    inside,
    read_config,
    read_tensors,
    vocabulary,
)
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.spec import Imported
from longtrain.targets.info import TargetSketch

log = get_logger(__name__)

Json = dict[str, Any]

TRAINERS = ("longtrain", "speculators", "specforge", "eagle", "modelopt", "angelslim")
"""Trainers whose folders are understood; `trained_by=` takes one of them."""
LEFT_OUT = ("verifier_norm.weight", "verifier_lm_head.weight")
"""A folder's tensors that are no part of the draft."""
DEPTHS = 7


def read_folder(folder: Path, trained_by: str | None) -> Imported:
    """The draft of a folder of either format.

    Args:
        folder: holds `config.json` and the tensors.
        trained_by: one of `TRAINERS`; None: what the folder says of itself, if it does.

    Raises:
        ConfigError: no such trainer.
        ArtifactError: the folder is damaged, holds another kind of draft, or does not say what was trained.
    """
    form, raw = format_of(folder), read_config(folder)
    if form is None:
        raise ArtifactError(
            f"{folder / CONFIG} describes no EAGLE-3 draft; allowed: {SPECULATORS}, {FLAT} folders"
        )
    trainer = trained_by or raw.get("trained_by")
    if trainer is not None and trainer not in TRAINERS:
        raise ConfigError(f"trained_by={trainer} is no trainer that is known; allowed: {', '.join(TRAINERS)}")
    layer = raw["transformer_layer_config"] if form == SPECULATORS else raw
    keys = FolderKeys(folder, form, raw, layer, trainer)
    config = keys.config()
    tensors = _checked(folder, config, keys.sketch(config), read_tensors(folder))
    about = {"format": form, "trained_by": trainer or "not stated", "folder": folder.name}
    return Imported(dataclasses.asdict(config), tensors, keys.sketch(config), about)


@dataclasses.dataclass(frozen=True)
class FolderKeys:
    """What the keys of one folder mean.

    Args:
        folder: for messages.
        form: its format.
        raw: its `config.json`.
        layer: the keys that describe the layer: `raw`, or a part of it.
        trainer: who trained it; None: not known.
    """

    folder: Path
    form: str
    raw: Json
    layer: Json
    trainer: str | None

    def config(self) -> Config:
        """The hyperparameters."""
        if self.count("num_hidden_layers", 1) != 1:
            raise self.error(f"num_hidden_layers={self.layer['num_hidden_layers']}; allowed: 1")
        if self.layer.get("mlp_bias"):
            raise self.error("mlp_bias=true; allowed: false")
        size, vocab = (
            self.count("draft_vocab_size", self.need("vocab_size"), self.raw),
            self.need("vocab_size"),
        )
        target_size = self.raw.get("target_hidden_size") or self.need("hidden_size")
        if target_size != self.need("hidden_size"):
            raise self.error(
                f"its hidden size is {self.need('hidden_size')}, its target's {target_size}; allowed: the "
                "same"
            )
        window = self.window()
        heads = self.need("num_attention_heads")
        dim = self.layer.get("head_dim") or self.need("hidden_size") // heads
        return Config(
            layers=self.layers(),
            draft_vocab_size=0 if size == vocab else size,
            depths=DEPTHS if not window else max(1, min(DEPTHS, window - 1)),
            fc_norm=bool(self.flag("fc_norm") or self.raw.get("use_aux_norm")),
            norm_output=self.norm_output(),
            norm_before_fc=bool(self.eagle().get("norm_before_fc", self.flag("norm_before_fc"))),
            norm_before_residual=self.norm_before_residual(),
            window=window,
            intermediate_size=self.need("intermediate_size"),
            n_heads=heads,
            n_kv_heads=self.count("num_key_value_heads", heads),
            head_dim=dim,
            attention_bias=bool(self.layer.get("attention_bias", False)),
            qk_norm=self.layer.get("model_type") == "qwen3" or "Qwen3" in str(self.raw.get("architectures")),
            rms_norm_eps=float(self.layer.get("rms_norm_eps", 1e-6)),
            rope=self.rope(),
            own_embeddings=bool(self.raw.get("embed_requires_grad", False)),
        )

    def sketch(self, config: Config) -> TargetSketch:
        """What the folder says of the target."""
        verifier = (self.raw.get("speculators_config") or {}).get("verifier") or {}
        return TargetSketch(
            name=verifier.get("name_or_path") or "",
            family="llama",
            n_layers=max(config.layers) + 1 if config.layers else 8,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            hidden_size=self.need("hidden_size"),
            intermediate_size=config.intermediate_size,
            vocab_size=self.need("vocab_size"),
            max_positions=self.count("max_position_embeddings", 2048),
            rms_norm_eps=config.rms_norm_eps,
            rope=config.rope or {},
            qk_norm=config.qk_norm,
            attention_bias=config.attention_bias,
            hidden_act=str(self.layer.get("hidden_act", "silu")),
        )

    def layers(self) -> list[int] | None:
        """Layers whose outputs are read; None: those that every engine takes where no key is there."""
        inputs = self.raw.get("eagle_aux_hidden_state_layer_ids")
        inputs = self.layer.get("eagle_aux_hidden_state_layer_ids") if inputs is None else inputs
        outputs = self.eagle().get("eagle_aux_hidden_state_layer_ids")
        if inputs is not None and outputs is not None and [one - 1 for one in inputs] != list(outputs):
            raise self.error(
                f"eagle_aux_hidden_state_layer_ids={inputs} counts inputs of layers, eagle_config has "
                f"{outputs}, "
                f"which counts outputs: they must differ by one; allowed: {[one - 1 for one in inputs]} there"
            )
        if inputs is not None:
            return [int(one) - 1 for one in inputs]
        if outputs is None:
            return None
        if self.trainer is None:
            raise self.error(
                f"layer ids {outputs} stand in eagle_config alone: SGLang reads them as outputs of "
                "layers, vLLM as "
                "inputs; say who trained it, trained_by=specforge (outputs), or add the top-level key"
            )
        return [int(one) for one in outputs]

    def norm_before_residual(self) -> bool:
        """Whether the residual begins with the normed feature."""
        if "norm_before_residual" in self.raw:
            return bool(self.raw["norm_before_residual"])
        if self.form == FLAT:
            return False
        if self.trainer != "speculators":
            raise self.error(
                "norm_before_residual is missing: vLLM takes true, the speculators class false; say who "
                "trained "
                "it, trained_by=speculators (true), or add the key"
            )
        return True

    def norm_output(self) -> bool:
        """Whether the next depth reads the normed state; SpecForge's trainer never fed it back (its #879)."""
        if self.trainer != "specforge":
            return self.flag("norm_output")
        if self.raw.get("norm_output", True) is False:
            raise self.error(
                "norm_output=false of SpecForge trains without a norm before the head, and no engine "
                "decodes so; "
                "train it again with SpecForge after its change 879"
            )
        if self.raw.get("norm_output"):
            log.warning(
                "folder=%s norm_output=true is read as false: SpecForge did not train it", self.folder
            )
        return False

    def window(self) -> int:
        """Rows seen before the row itself; engines count the row too."""
        kinds, size = self.layer.get("layer_types"), self.layer.get("sliding_window")
        slides = "sliding_attention" in (kinds or [])
        if slides and not size:
            raise self.error("layer_types says sliding_attention and sliding_window is missing")
        if self.layer.get("use_sliding_window") and size and not slides:
            raise self.error(
                f"use_sliding_window=true and sliding_window={size} without layer_types: engines differ "
                "in what "
                'they make of it; add layer_types=["sliding_attention"]'
            )
        return int(size) - 1 if slides and size else 0

    def rope(self) -> Json:
        """`rope_parameters`, from either spelling."""
        new = self.layer.get("rope_parameters")
        old = dict(self.layer.get("rope_scaling") or {})
        if old.get("type") and not old.get("rope_type"):
            old["rope_type"] = old["type"]
        old.pop("type", None)
        theta = self.layer.get("rope_theta")
        if new is None:
            return {"rope_type": "default", "rope_theta": float(theta or 10000.0), **old}
        new = {"rope_type": "default", **new}
        if "rope_theta" not in new:
            new["rope_theta"] = float(theta or 10000.0)
        clash = {"rope_theta": theta, **old}
        for key, value in clash.items():
            if value is not None and new.get(key, value) != value:
                raise self.error(
                    f"rope_parameters has {key}={new.get(key)}, the older keys have {value}; make them equal"
                )
        return new

    def eagle(self) -> Json:
        """`eagle_config`, or nothing."""
        return self.layer.get("eagle_config") or self.raw.get("eagle_config") or {}

    def flag(self, key: str) -> bool:
        """A switch that is off where it is missing, in every engine."""
        return bool(self.raw.get(key, False))

    def count(self, key: str, default: int, where: Json | None = None) -> int:
        """A whole number, or what a missing key stands for."""
        value = (self.layer if where is None else where).get(key)
        return int(default if value is None else value)

    def need(self, key: str) -> int:
        """A whole number that must be there."""
        if not isinstance(self.layer.get(key), int):
            raise self.error(f"{key}={self.layer.get(key)}; allowed: a whole number")
        return int(self.layer[key])

    def error(self, what: str) -> ArtifactError:
        """The error of a folder."""
        return ArtifactError(f"{self.folder / CONFIG}: {what}")


def expected_shapes(config: Config, sketch: TargetSketch) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the module that a configuration describes.

    Raises:
        TargetMismatchError: it describes none.
    """
    with torch.device("meta"):
        module = Eagle3Draft(config, sketch)
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _checked(
    folder: Path, config: Config, sketch: TargetSketch, found: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The module's tensors, all of them and in its shapes."""
    want = expected_shapes(config, sketch)
    size = draft_vocab(config, sketch.vocab_size)
    tensors = {IDS: vocabulary(found, size=size, whole=sketch.vocab_size, where=folder)}
    problems = []
    for outer, tensor in found.items():
        name = inside(outer)
        if name in (OFFSETS, MASK, *LEFT_OUT) or name.endswith("rotary_emb.inv_freq"):
            continue
        if name == "embed_tokens.weight" and not config.own_embeddings:
            continue  # a copy of the target's
        if name == "self_attn.o_proj.bias" and not tensor.any():
            continue
        if name not in want:
            problems.append(f"unexpected {outer} {tuple(tensor.shape)}")
        elif tuple(tensor.shape) != want[name]:
            problems.append(f"{outer} is {tuple(tensor.shape)}, not {want[name]}")
        elif name in tensors:
            problems.append(f"{outer} is there twice")
        else:
            tensors[name] = tensor
    problems += [f"missing {name} {shape}" for name, shape in want.items() if name not in tensors]
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ArtifactError(
            f"{folder} does not hold the draft that its {CONFIG} describes: {'; '.join(problems[:6])}{more}"
        )
    return {name: tensors[name] for name in want}
