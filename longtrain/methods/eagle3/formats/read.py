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

from longtrain.errors import ArtifactError, ConfigError, LongtrainError
from longtrain.log import get_logger
from longtrain.methods.eagle3.config import Config, draft_vocab
from longtrain.methods.eagle3.formats.keys import Keys
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
from longtrain.targets.rotary import Rotary

log = get_logger(__name__)

Json = dict[str, Any]

TRAINERS = ("longtrain", "speculators", "specforge", "eagle", "modelopt", "angelslim")
"""Trainers whose folders are understood; `trained_by=` takes one of them."""
LEFT_OUT = ("verifier_norm.weight", "verifier_lm_head.weight")
"""A folder's tensors that are no part of the draft."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types of weights; a cast from any other would make other numbers of them."""
LAYER_KEY = "transformer_layer_config"
DEPTHS = 7
LEAST_WINDOW = 3
"""The smallest `sliding_window`: the token itself, and two before it, more than the one depth then read."""


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
    keys = FolderKeys.of(folder, form, raw, trained_by)
    try:
        config = keys.config()
        sketch = keys.sketch(config)
        want = expected_shapes(config, sketch)
        Rotary(sketch.rope, head_dim=sketch.head_dim, max_positions=sketch.max_positions)
    except ArtifactError:
        raise
    except (LongtrainError, KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise keys.raw.error(f"describes no draft that can be built: {said}; copy it again") from None
    tensors = _checked(folder, config, sketch, want, read_tensors(folder))
    about = {"format": form, "trained_by": keys.trainer or "not stated", "folder": folder.name}
    return Imported(dataclasses.asdict(config), tensors, sketch, about)


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
    raw: Keys
    layer: Keys
    trainer: str | None

    @classmethod
    def of(cls, folder: Path, form: str, values: Json, trained_by: str | None) -> FolderKeys:
        """The keys of a folder.

        Raises:
            ConfigError: `trained_by` is no trainer that is known.
            ArtifactError: the folder names such a one, or does not describe its layer.
        """
        raw = Keys(folder / CONFIG, values)
        trainer = trained_by or raw.text("trained_by") or None
        if trainer is not None and trainer not in TRAINERS:
            allowed = ", ".join(TRAINERS)
            if trained_by is None:
                raise raw.wrong("trained_by", f"{allowed}; say who trained it, trained_by=NAME")
            raise ConfigError(f"trained_by={trainer} is no trainer that is known; allowed: {allowed}")
        if form == SPECULATORS and not raw.has(LAYER_KEY):
            raise raw.wrong(LAYER_KEY, "a mapping of keys; copy the folder again")
        return cls(folder, form, raw, raw.part(LAYER_KEY) if form == SPECULATORS else raw, trainer)

    def config(self) -> Config:
        """The hyperparameters."""
        raw, layer = self.raw, self.layer
        if layer.whole("num_hidden_layers", 1) != 1:
            raise layer.wrong("num_hidden_layers", "1")
        if layer.switch("mlp_bias"):
            raise layer.wrong("mlp_bias", "false")
        vocab, hidden = layer.whole("vocab_size"), layer.whole("hidden_size")
        size = raw.whole("draft_vocab_size", vocab)
        target_size = raw.whole("target_hidden_size", hidden)
        if target_size != hidden:
            raise raw.error(f"its hidden size is {hidden}, its target's {target_size}; allowed: the same")
        window = self.window()
        heads = layer.whole("num_attention_heads")
        return Config(
            layers=self.layers(),
            draft_vocab_size=0 if size == vocab else size,
            depths=DEPTHS if not window else max(1, min(DEPTHS, window - 1)),
            fc_norm=raw.switch("fc_norm") or raw.switch("use_aux_norm"),
            norm_output=self.norm_output(),
            norm_before_fc=self.eagle().switch("norm_before_fc", raw.switch("norm_before_fc")),
            norm_before_residual=self.norm_before_residual(),
            window=window,
            intermediate_size=layer.whole("intermediate_size"),
            n_heads=heads,
            n_kv_heads=layer.whole("num_key_value_heads", heads),
            head_dim=layer.whole("head_dim", max(1, hidden // heads)),
            attention_bias=layer.switch("attention_bias"),
            qk_norm=layer.text("model_type") == "qwen3"
            or any("Qwen3" in name for name in raw.texts("architectures")),
            rms_norm_eps=layer.number("rms_norm_eps", 1e-6),
            rope=self.rope(),
            own_embeddings=raw.switch("embed_requires_grad"),
        )

    def sketch(self, config: Config) -> TargetSketch:
        """What the folder says of the target."""
        return TargetSketch(
            name=self.raw.part("speculators_config").part("verifier").text("name_or_path"),
            family="llama",
            n_layers=max(config.layers) + 1 if config.layers else 8,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            hidden_size=self.layer.whole("hidden_size"),
            intermediate_size=config.intermediate_size,
            vocab_size=self.layer.whole("vocab_size"),
            max_positions=self.layer.whole("max_position_embeddings", 2048),
            rms_norm_eps=config.rms_norm_eps,
            rope=config.rope or {},
            qk_norm=config.qk_norm,
            attention_bias=config.attention_bias,
            hidden_act=self.layer.text("hidden_act", "silu"),
        )

    def layers(self) -> list[int] | None:
        """Layers whose outputs are read; None: those that every engine takes where no key is there."""
        key = "eagle_aux_hidden_state_layer_ids"
        inputs = (self.raw if self.raw.has(key) else self.layer).wholes(key, least=1)
        outputs = self.eagle().wholes(key, least=0)
        if inputs is not None and outputs is not None and [one - 1 for one in inputs] != outputs:
            raise self.raw.error(
                f"eagle_aux_hidden_state_layer_ids={inputs} counts inputs of layers, eagle_config has "
                f"{outputs}, "
                f"which counts outputs: they must differ by one; allowed: {[one - 1 for one in inputs]} there"
            )
        if inputs is not None:
            return [one - 1 for one in inputs]
        if outputs is not None and self.trainer is None:
            raise self.raw.error(
                f"layer ids {outputs} stand in eagle_config alone: SGLang reads them as outputs of "
                "layers, vLLM as "
                "inputs; say who trained it, trained_by=specforge (outputs), or add the top-level key"
            )
        return outputs

    def norm_before_residual(self) -> bool:
        """Whether the residual begins with the normed feature."""
        if self.raw.has("norm_before_residual") or self.form == FLAT:
            return self.raw.switch("norm_before_residual")
        if self.trainer != "speculators":
            raise self.raw.error(
                "norm_before_residual is missing: vLLM takes true, the speculators class false; say who "
                "trained "
                "it, trained_by=speculators (true), or add the key"
            )
        return True

    def norm_output(self) -> bool:
        """Whether the next depth reads the normed state; SpecForge's trainer never fed it back (its #879)."""
        said = self.raw.switch("norm_output")
        if self.trainer != "specforge":
            return said
        if self.raw.has("norm_output") and not said:
            raise self.raw.error(
                "norm_output=false of SpecForge trains without a norm before the head, and no engine "
                "decodes so; "
                "train it again with SpecForge after its change 879"
            )
        if said:
            log.warning(
                "folder=%s norm_output=true is read as false: SpecForge did not train it", self.folder
            )
        return False

    def window(self) -> int:
        """Rows seen before the row itself; engines count the row too."""
        layer = self.layer
        slides = "sliding_attention" in layer.texts("layer_types")
        size = layer.whole("sliding_window", 0, least=0)
        if slides and not size:
            raise layer.error("layer_types says sliding_attention and sliding_window is missing")
        if slides and size < LEAST_WINDOW:
            raise layer.wrong("sliding_window", f"{LEAST_WINDOW} or more: it counts the token itself")
        if layer.switch("use_sliding_window") and size and not slides:
            raise layer.error(
                f"use_sliding_window=true and sliding_window={size} without layer_types: engines differ "
                "in what "
                'they make of it; add layer_types=["sliding_attention"]'
            )
        return size - 1 if slides else 0

    def rope(self) -> Json:
        """`rope_parameters`, from either spelling."""
        layer = self.layer
        theta = layer.number("rope_theta", 1.0) if layer.has("rope_theta") else None
        old = dict(layer.part("rope_scaling").values)
        if old.get("type") and not old.get("rope_type"):
            old["rope_type"] = old["type"]
        old.pop("type", None)
        if not layer.has("rope_parameters"):
            return {"rope_type": "default", "rope_theta": theta or 10000.0, **old}
        part = layer.part("rope_parameters")
        new = {
            "rope_type": "default",
            **part.values,
            "rope_theta": part.number("rope_theta", theta or 10000.0),
        }
        for key, value in {"rope_theta": theta, **old}.items():
            if value is not None and new.get(key, value) != value:
                raise layer.error(
                    f"rope_parameters has {key}={new.get(key)}, the older keys have {value}; make them equal"
                )
        return new

    def eagle(self) -> Keys:
        """`eagle_config`, or nothing."""
        return (self.layer if self.layer.has("eagle_config") else self.raw).part("eagle_config")


def expected_shapes(config: Config, sketch: TargetSketch) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the module that a configuration describes.

    Raises:
        TargetMismatchError: it describes none.
    """
    with torch.device("meta"):
        module = Eagle3Draft(config, sketch)
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _checked(
    folder: Path,
    config: Config,
    sketch: TargetSketch,
    want: Mapping[str, tuple[int, ...]],
    found: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The module's tensors, all of them and in its shapes."""
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
        elif name != IDS and tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            problems.append(f"{outer} is {kind}, not bfloat16, float16, float32 or float64")
        else:
            tensors[name] = tensor
    problems += [f"missing {name} {shape}" for name, shape in want.items() if name not in tensors]
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ArtifactError(
            f"{folder} does not hold the draft that its {CONFIG} describes: {'; '.join(problems[:6])}{more}"
        )
    return {name: tensors[name] for name in want}
