"""Facts about a target that modules depend on, and the check that a target is supported.

Shapes: L layers, H query heads, G KV heads, D head dim, E hidden dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from longtrain.costs.model import Experts
from longtrain.errors import TargetMismatchError
from longtrain.targets.families import FAMILIES, family_of, missing, not_served

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose angles do not change with the length."""
_ROPE_KEYS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": None},
    "llama3": dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    ),
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": None,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": True,
    },
}
"""Keys that each rotary type reads besides `rope_theta`, with the default of each."""
PARTS_OF_HEADS = {"partial_rotary_factor": 1, "neighbours": False}
"""Keys that say which dims of a head are rotated, and in which pairs (`Family.neighbours`), with defaults."""
_KINDS = {"full_attention", "sliding_attention"}
"""Entries of a config's `layer_types` that are served."""


@dataclass(frozen=True)
class LayerInfo:
    """Geometry of one decoder layer's attention.

    Args:
        n_kv_heads: G.
        head_dim: size of a key (and query) head.
        value_dim: size of a value head.
        kv_of: the layer whose K and V it reads, usually its own index.
        window: keys that a token sees, itself included; 0: all.
        rope: rotary parameters (`rope_values`); empty: queries and keys are not rotated.
    """

    n_kv_heads: int
    head_dim: int
    value_dim: int
    kv_of: int
    window: int = 0
    rope: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`window` if a token sees the last `window` keys only, else `full`."""
        return "window" if self.window else "full"


@dataclass(frozen=True)
class TargetInfo:
    """Facts about a frozen target that modules are built from and artifacts are checked against.

    `name` and `weights_hash` identify the target; every other field affects a module's arithmetic. `rope` is
    the rotary embedding of the layers that see the whole text. `layers` has the geometry of each layer where
    they differ or have windows, and is empty otherwise (`layer` returns it in both cases). `experts` has the
    values of `costs.model.Experts`, and is empty if all MLPs are dense.
    """

    name: str
    family: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope: dict[str, Any]
    qk_norm: bool
    attention_bias: bool
    hidden_act: str = "silu"
    layers: tuple[LayerInfo, ...] = ()
    experts: dict[str, int] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    tokenizer_hash: str = ""
    weights_hash: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        values = asdict(self)
        for name in ("layers", "experts"):
            if not values[name]:
                del values[name]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Rebuild from `to_json`'s output; unknown keys are stored in `extra`."""
        known = {f.name for f in fields(cls)}
        data = {key: value for key, value in values.items() if key in known}
        data["eos_ids"] = tuple(data.get("eos_ids", ()))
        data["layers"] = tuple(LayerInfo(**layer) for layer in data.get("layers", ()))
        data["extra"] = {**data.get("extra", {}), **{k: v for k, v in values.items() if k not in known}}
        return cls(**data)

    @property
    def source(self) -> dict[str, str]:
        """Identity of the weights (`targets.at_hand.source_of`); empty if their files do not state it."""
        found = self.extra.get("source")
        return {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}

    @property
    def known_weights(self) -> str:
        """Hash of all weights, or of those that were read without the layers (`targets.stored.foreign`)."""
        return self.weights_hash or str(self.extra.get("ends", ""))

    @property
    def swiglu(self) -> bool:
        """True if every layer has one MLP of gate, up and down projections (`Family.swiglu`)."""
        return not self.experts and family_of(self.family).swiglu

    def layer(self, index: int) -> LayerInfo:
        """Return the geometry of a layer."""
        if self.layers:
            return self.layers[index]
        return LayerInfo(self.n_kv_heads, self.head_dim, self.head_dim, kv_of=index, rope=self.rope)

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each layer; 0: a token sees the whole text."""
        return tuple(self.layer(index).window for index in range(self.n_layers))

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose tokens see the whole text."""
        return tuple(index for index, window in enumerate(self.windows) if not window)

    @property
    def readable_layers(self) -> tuple[int, ...]:
        """Layers that a draft can read keys and values of: without a window, and of the embedding `rope`."""
        return tuple(index for index in self.full_layers if self.layer(index).rope == self.rope)

    def entries(self, tokens: float, *, kept: float | None = None) -> float:
        """Return how many KV entries of a KV head a text needs, summed over the layers.

        Args:
            tokens: tokens of the text; a layer with a window needs no more than it.
            kept: entries that remain in each layer without a window; None: all.
        """
        near = sum(min(window, tokens) for window in self.windows if window)
        return near + len(self.full_layers) * (tokens if kept is None else kept)

    def require_full_layers(self, what: str) -> None:
        """Refuse `what`, which reads all KV entries of every layer, for a target with sliding windows.

        Raises:
            TargetMismatchError: a layer has a window.
        """
        windows = [layer.window for layer in self.layers if layer.window]
        if windows:
            raise TargetMismatchError(
                f"{what} is not built for sliding windows, and {len(windows)} of {self.n_layers} layers of "
                f"target {self.name} have one of {max(windows)} tokens; leave it out, or pass another target"
            )

    def check(self, other: TargetInfo) -> None:
        """Refuse a target that differs from the one a module was trained for.

        Args:
            other: the target in use; `self` is the one in the artifact.

        Raises:
            TargetMismatchError: a shape, rotary setting, tokenizer or the weights differ.
        """
        arithmetic = [
            f.name for f in fields(self) if f.name not in {"name", "extra", "max_positions", "eos_ids"}
        ]
        for key in arithmetic:
            mine, theirs = getattr(self, key), getattr(other, key)
            if key in {"tokenizer_hash", "weights_hash"} and not (mine and theirs):
                continue
            if key == "rope":
                mine, theirs = rope_values(mine), rope_values(theirs)
            if mine != theirs:
                if key == "layers":
                    mine, theirs = _differing(self, other)
                raise TargetMismatchError(
                    f"artifact was trained for {self.name} ({key}={mine}), the target at hand is "
                    f"{other.name} ({key}={theirs}); pass the target it was trained for, "
                    f"e.g. target.path={self.name}"
                )


def _differing(mine: TargetInfo, theirs: TargetInfo) -> tuple[str, str]:
    """Return the first layer that differs between targets of as many layers, in words, as each has it."""
    pairs = ((mine.layer(index), theirs.layer(index)) for index in range(mine.n_layers))
    at, pair = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    one, other = (f"layer {at}: {asdict(layer)}" for layer in pair)
    return one, other


def source_line(source: Mapping[str, str]) -> str:
    """Return a target's source (`TargetInfo.source`) in words; empty if unknown."""
    if "gguf" in source:
        told = (source["gguf"], source.get("quantisation"), f"SHA-256 {source.get('sha256')}")
        return f"GGUF {', '.join(map(str, told))}"
    return f"Hub revision {source['hub_revision']}" if "hub_revision" in source else ""


@dataclass(frozen=True)
class TargetSketch(TargetInfo):
    """A target's facts in another tool's folder; only these are compared.

    `n_layers` is the fewest layers that the target can have; `name` may be empty.
    """

    def check(self, other: TargetInfo) -> None:
        """Refuse a target that the module cannot serve.

        Raises:
            TargetMismatchError: another hidden size or vocabulary, or too few layers.
        """
        for key, what in (("hidden_size", "hidden size"), ("vocab_size", "a vocabulary of")):
            mine, theirs = getattr(self, key), getattr(other, key)
            if mine != theirs:
                raise TargetMismatchError(
                    f"the module is for a target with {what} {mine}, {other.name} has {theirs}; pass the "
                    "target it was trained for, target.path=FOLDER"
                )
        if other.n_layers < self.n_layers:
            raise TargetMismatchError(
                f"the module is for a target of {self.n_layers} layers or more, {other.name} has "
                f"{other.n_layers}; pass the target it was trained for, target.path=FOLDER"
            )


def rope_values(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Normalise rotary parameters, so that equal angles give equal values whatever their spelling.

    Args:
        rope: `rope_parameters` of transformers, or as another tool or version spells them.

    Returns:
        `rope_type` and its numbers, sorted by name, without defaults.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    usual = {"rope_theta": None, **PARTS_OF_HEADS, **_ROPE_KEYS.get(kind, dict.fromkeys(rope))}
    found: dict[str, Any] = {"rope_type": kind}
    for key, value in rope.items():
        if key in ("rope_type", "type") or key not in usual or value is None or value == usual[key]:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole = key == "original_max_position_embeddings"
        found[key] = (int(value) if whole else float(value)) if number else value
    return dict(sorted(found.items()))


def draft_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a target's rotary parameters as a draft has them: whole heads, halves paired, one position."""
    return {key: value for key, value in rope.items() if key not in {*PARTS_OF_HEADS, "mrope_section"}}


def check_supported(config: Any, where: str) -> None:
    """Refuse a target whose attention the hook would get wrong.

    Args:
        config: a transformers config.
        where: the target's name, for the message.

    Raises:
        TargetMismatchError: latent attention (MLA), sinks, softcapping, an encoder, layers of another kind, a
            rotary type whose angles change with the length, experts that tokens cannot be given to, or a
            family that is not tested.
    """
    if reason := _reason(config):
        raise not_served(where, config.model_type, reason)


def _reason(config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model, not a decoder"
    if reason := missing(config.model_type):
        return reason
    if getattr(config, "kv_lora_rank", None):
        return f"has latent attention (MLA, kv_lora_rank={config.kv_lora_rank})"
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            return f"softcaps its logits ({key}={getattr(config, key)})"
    text = getattr(getattr(config, "text_config", None), "model_type", None)
    if text in FAMILIES:
        return (
            f"reads more than text; allowed is its text model alone ({text}), in a folder whose config.json "
            "is this one's text_config"
        )
    if config.model_type not in FAMILIES:
        return "is of a family that is not supported"
    kinds = getattr(config, "layer_types", None) or ()
    if other := sorted(set(kinds) - _KINDS):
        return f"has layers of type '{other[0]}' (allowed: {', '.join(sorted(_KINDS))})"
    if "sliding_attention" in (kinds := _kinds(config)):
        size = config.sliding_window
        if not isinstance(size, int) or size < 1:
            return f"has layers of type 'sliding_attention' and sliding_window={size} (allowed: 1 or more)"
        if config.model_type == "smollm3" and not config.use_sliding_window:
            return "has layers of type 'sliding_attention' and use_sliding_window=false"
    if "full_attention" not in kinds and "full_attention" in (getattr(config, "rope_parameters", None) or {}):
        return "has no layer that sees the whole text, whose rotary table drafts take"
    if getattr(config, "use_bidirectional_attention", False):
        return "sees later tokens (use_bidirectional_attention)"
    partial = FAMILIES[config.model_type].partial
    for rope in _tables(config).values():
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            return f"has rotary embeddings of type '{kind}' (allowed: {', '.join(ROPE_TYPES)})"
        if not partial and rope.get("partial_rotary_factor") not in (None, 1):
            return f"rotates a part of each head (partial_rotary_factor={rope['partial_rotary_factor']})"
    experts = Experts.of_keys(config.to_dict())
    return "" if experts is None else _wrong_routing(experts, config)


def _wrong_routing(experts: Experts, config: Any) -> str:
    """A reason why tokens cannot be given to experts as a config says, or an empty string."""
    groups = getattr(config, "n_group", None)
    if groups is None:
        ranges = [("num_experts_per_tok", experts.per_token, experts.count, "its experts")]
    else:
        size = experts.count // groups if groups > 0 and experts.count % groups == 0 else 0
        if size < 2:  # a group's score is that of its best two
            return f"has n_group={groups}, and {experts.count} experts do not form groups of 2 or more"
        read = config.topk_group * size
        ranges = [
            ("topk_group", config.topk_group, groups, "n_group"),
            ("num_experts_per_tok", experts.per_token, read, "the experts of topk_group groups"),
        ]
    for name, value, most, why in ranges:
        if not 0 < value <= most:
            return f"has {name}={value} (allowed: 1 to {most}, {why})"
    return ""


def geometry(config: Any, head_dim: int, context: int) -> tuple[dict[str, Any], tuple[LayerInfo, ...]]:
    """Return the rotary parameters of a model's full layers, and `TargetInfo.layers`.

    Args:
        config: a config that `check_supported` accepts.
        head_dim: size of its heads.
        context: most tokens of a text; a window that spans them is none.
    """
    size = getattr(config, "sliding_window", None) or 0
    pairs = {"neighbours": FAMILIES[config.model_type].neighbours}
    tables = {kind: rope_values({**rope, **pairs}) for kind, rope in _tables(config).items()}
    layers = []
    for index, kind in enumerate(_kinds(config)):
        window = size if kind == "sliding_attention" and size < context else 0
        rope = tables[kind] if _rotates(config, index) else {}
        G = config.num_key_value_heads
        layers.append(LayerInfo(G, head_dim, head_dim, kv_of=index, window=window, rope=rope))
    main = tables["full_attention"]
    plain = all(not layer.window and layer.rope == main for layer in layers)
    return main, () if plain else tuple(layers)


def _kinds(config: Any) -> list[str]:
    """Return the type of each layer, as the family's modules read the config."""
    windows = FAMILIES[config.model_type].windows
    if windows == "layer_types":
        return list(config.layer_types)
    near = windows == "all" and getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if near else "full_attention"] * config.num_hidden_layers


def _tables(config: Any) -> dict[str, dict[str, Any]]:
    """Return the rotary parameters of a config by the type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rope:
        return {kind: rope.get(kind) or {} for kind in _KINDS}
    return dict.fromkeys(_KINDS, rope)


def _rotates(config: Any, layer: int) -> bool:
    """Return False for a layer whose attention knows no positions (NoPE)."""
    if config.model_type == "exaone4":  # a model with windows rotates in their layers only
        return not config.sliding_window or config.layer_types[layer] == "sliding_attention"
    rotated = getattr(config, "no_rope_layers", None)
    return bool(rotated[layer]) if rotated is not None else True
