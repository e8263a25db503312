"""The shape of a target that is not loaded: from its config.json, else from `target.shape`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.costs.model import Sizes
from longtrain.errors import ConfigError
from longtrain.files import read_json
from longtrain.settings import Count, CountOrZero, read, wrong
from longtrain.targets.at_hand import folder_of
from longtrain.targets.families import FAMILIES, refuse_missing
from longtrain.targets.info import LayerInfo, TargetInfo, geometry

if TYPE_CHECKING:
    from longtrain.config import TargetConfig


@dataclass(frozen=True)
class _Shape:
    """A target's sizes, as given by `target.shape`."""

    n_layers: Count
    n_heads: Count
    n_kv_heads: Count
    head_dim: Count
    hidden_size: Count
    intermediate_size: Count
    vocab_size: Count
    max_positions: Count
    tied: bool = False
    experts: Any = None
    windows: Any = None


@dataclass(frozen=True)
class _Experts:
    """`target.shape.experts`, as `costs.model.Experts`."""

    count: Count
    per_token: Count
    size: Count
    shared: CountOrZero = 0
    dense_layers: CountOrZero = 0


@dataclass(frozen=True)
class _Windows:
    """`target.shape.windows`: the number of layers in which a token sees so many last tokens.

    Which layers they are makes no difference to a plan.
    """

    tokens: Count
    layers: Count


def target_shape(target: TargetConfig, *, served: bool = True) -> tuple[TargetInfo, bool]:
    """The target's shape, and True if its LM head shares the embedding's weights.

    Args:
        target: the target's settings.
        served: refuse a family that is known and not served; False where an engine runs the target.

    Raises:
        ConfigError: there is neither a config.json nor `target.shape`.
        TargetMismatchError: the target is of a family that is known and not served.
    """
    where = str(target.path or "")
    if (file := config_file(where)) is not None:
        raw = read_json(file)
        raw = {**raw, **(raw.get("text_config") or {})}
        if served:
            refuse_missing(where, raw)
        shape = {
            **asdict(Sizes.of_keys(raw)),
            "max_positions": target.max_positions or raw["max_position_embeddings"],
            "tied": raw.get("tie_word_embeddings", False),
            "family": raw.get("model_type", ""),
            **_geometry(raw, target.max_positions, partial(_config_at, file)),
        }
    elif target.shape is not None:
        shape = _shape_of(target.shape)
    else:
        raise ConfigError(
            f"cannot know the shape of target.path={where or 'null'}: no config.json there and no "
            "target.shape; pass +recipe=NAME, target=NAME, target.path=FOLDER or target.shape=llama31_8b, say"
        )
    tied = bool(shape.pop("tied", False))
    shape["experts"] = shape["experts"] or {}
    unknown = {"family": "", "rms_norm_eps": 1e-6, "rope": {}, "qk_norm": False, "attention_bias": False}
    return TargetInfo(name=where, **{**unknown, **shape}), tied


def _geometry(raw: Mapping[str, Any], max_positions: int | None, config: Callable[[], Any]) -> dict[str, Any]:
    """The rotary embedding and the layers of a target with windows; empty for others, where no job asks.

    Args:
        raw: the keys of its config.json.
        max_positions: most tokens of a text; None: those of the config.
        config: makes the model's config.
    """
    if not raw.get("sliding_window") or raw.get("model_type") not in FAMILIES:
        return {}
    most = max_positions or raw["max_position_embeddings"]
    rope, layers = geometry(config().get_text_config(), Sizes.of_keys(raw).head_dim, most)
    return {"rope": rope, "layers": layers}


def _config_at(file: Path) -> Any:
    """Read a target's `config.json`."""
    from longtrain.targets.config_file import read_config

    return read_config(file.parent)


def config_file(where: str) -> Path | None:
    """The path of a target's `config.json` on this machine, or None."""
    try:
        file = folder_of(where, fetch=False) / "config.json" if where else None
    except ConfigError:
        return None
    return file if file is not None and file.is_file() else None


def _shape_of(shape: Any) -> dict[str, Any]:
    """`target.shape` as a mapping of sizes; the name of a published shape is replaced by its sizes."""
    from longtrain.targets.shapes import SHAPES, shape_config

    if isinstance(shape, Mapping):
        found = dict(vars(read(_Shape, shape, "target.shape")))
        if found["experts"] is not None:
            found["experts"] = vars(read(_Experts, found["experts"], "target.shape.experts"))
        if (given := found.pop("windows")) is not None:
            windows, n_layers = read(_Windows, given, "target.shape.windows"), found["n_layers"]
            if windows.layers > n_layers:
                raise wrong("target.shape.windows.layers", windows.layers, f"1 to n_layers={n_layers}")
            size = found["n_kv_heads"], found["head_dim"], found["head_dim"]
            near = [windows.tokens] * windows.layers + [0] * (n_layers - windows.layers)
            found["layers"] = tuple(LayerInfo(*size, kv_of=at, window=one) for at, one in enumerate(near))
        return found
    if shape not in SHAPES:
        sizes = ", ".join(one.name for one in fields(_Shape))
        raise ConfigError(
            f"target.shape={shape}; allowed: one of {', '.join(SHAPES)}, or a mapping with {sizes}"
        )
    keys = SHAPES[shape]
    most, tied = keys["max_position_embeddings"], keys["tie_word_embeddings"]
    layers = _geometry(keys, most, partial(shape_config, shape))
    return {**asdict(Sizes.of_keys(keys)), "max_positions": most, "tied": tied, **layers}
