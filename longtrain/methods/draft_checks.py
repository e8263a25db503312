"""Checks of folders with drafts: their record, the health of tensors, recorded outputs, and a text.

Shapes: T tokens, K depths or slots, R chains or blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn

from longtrain.assets import asset_dir
from longtrain.errors import ArtifactError, first_line
from longtrain.files import read_json
from longtrain.layers import shapes_alone
from longtrain.methods.draft_folders import CONFIG, FOLDER, GOLDEN, MODEL, RECORD, fresh_norms, read_config
from longtrain.methods.written_folders import changed_files

if TYPE_CHECKING:
    from longtrain.methods.spec import Imported
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target

Json = dict[str, Any]
M = TypeVar("M", bound="nn.Module")

FREE = ("speculators_config", "dtype", "torch_dtype", "transformers_version")
"""Keys of `config.json` that may be edited after the export."""
LARGEST = 1e4
"""Largest plausible magnitude of a draft's trained weight."""
CLEARLY, SIGMAS = 0.02, 4.0
"""One interpretation is better if it predicts more tokens by this share and by so many standard errors."""


def read_record(folder: Path) -> Json | None:
    """Read the record of a folder's files; None if another tool wrote the folder.

    Raises:
        ArtifactError: longtrain wrote the folder, and its record is missing or damaged.
    """
    path = folder / RECORD
    if not path.is_file():
        if (folder / FOLDER).is_dir() or read_config(folder).get("trained_by") == "longtrain":
            raise ArtifactError(f"{path} is missing; copy the whole folder, or export it again")
        return None
    try:
        record = read_json(path)
        kinds = {"config": dict, "files": dict, "fresh": list}
        if not all(isinstance(record[key], kind) for key, kind in kinds.items()):
            raise ValueError("a key is of another kind")
        if lost := [name for name in (CONFIG, MODEL, GOLDEN) if name not in record["files"]]:
            raise ValueError(f"files has no checksum of {', '.join(lost)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}; export the folder again") from None
    return record


def changed_keys(then: Json, now: Json, before: str = "") -> list[str]:
    """Return a message for each key of `config.json` that was added, removed or changed since the export."""
    wrong = []
    for key in dict.fromkeys([*then, *now]):
        path = before + key
        if path in FREE or (key not in then and then.get(key) == now.get(key)):
            continue
        if key not in now:
            wrong.append(f"{CONFIG} lacks {path} (exported: {json.dumps(then[key])})")
        elif isinstance(then.get(key), dict) and isinstance(now[key], dict):
            wrong += changed_keys(then[key], now[key], f"{path}.")
        elif key not in then or then[key] != now[key]:
            wrong.append(
                f"{CONFIG} has {path}={json.dumps(now[key])} (exported: {json.dumps(then.get(key))})"
            )
    return wrong


def changes(folder: Path, record: Json) -> list[str]:
    """Return a message for each file and key of a folder that differs from the export."""
    others = {name: checksum for name, checksum in record["files"].items() if name != CONFIG}
    return changed_files(folder, others) + changed_keys(record["config"], read_config(folder))


def refuse_changed(folder: Path) -> None:
    """Refuse a folder that longtrain wrote and that was changed since.

    Raises:
        ArtifactError: files or keys differ; the message lists all of them.
    """
    record = read_record(folder)
    if record is not None and (wrong := changes(folder, record)):
        raise ArtifactError(f"{folder}: {'; '.join(wrong)}; export it again, or copy it whole")


def unchanged(read: Callable[[Path, str | None], Imported]) -> Callable[[Path, str | None], Imported]:
    """Return a reader of folders that also refuses one that was changed after its export.

    It reads first, since the messages on damage are more specific.
    """

    def checked(folder: Path, trained_by: str | None) -> Imported:
        found = read(folder, trained_by)
        refuse_changed(folder)
        return found

    return checked


def again_fresh(tensors: Mapping[str, Tensor], record: Json | None) -> tuple[list[str], list[str]]:
    """Return lines on norms that are all ones, and messages on those that were not when it was exported."""
    fresh = fresh_norms(tensors)
    if record is not None:
        return [], [
            f"{one} is as fresh (all ones) and was trained" for one in fresh if one not in record["fresh"]
        ]
    return [f"norms that are all ones: {', '.join(fresh)} (perhaps not trained)"] if fresh else [], []


def unhealthy(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return messages on tensors that cannot be the result of training (constant, not finite, too large)."""
    wrong = []
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        wide = tensor.float()
        if not bool(torch.isfinite(wide).all()):
            wrong.append(f"{name} holds numbers that are not finite")
        elif float(wide.abs().max()) > LARGEST:
            wrong.append(f"{name} reaches {float(wide.abs().max()):.3g} (allowed {LARGEST:g})")
        elif wide.ndim == 2 and float(wide.std()) == 0:
            wrong.append(f"{name} holds one number everywhere")
    return wrong


def draft_of(
    kind: Callable[[Any, TargetInfo], M], tensors: Mapping[str, Tensor], config: Any, info: TargetInfo
) -> M:
    """Build a draft's module from its tensors, in fp32 on the CPU."""
    with shapes_alone():
        module = kind(config, info)
    module = module.to_empty(device="cpu")
    module.load_state_dict({name: tensor.cpu() for name, tensor in tensors.items()})
    return module.float().eval().requires_grad_(False)


def distance(got: Tensor, expected: Tensor) -> float:
    """Return the largest distance between rows, relative to the centred recorded row; NaN is infinite."""
    expected_c, got_c = ((part - part.mean(-1, keepdim=True)).double() for part in (expected, got))
    far = (got_c - expected_c).norm(dim=-1) / expected_c.norm(dim=-1).clamp_min(1e-9)
    return float(torch.nan_to_num(far, nan=torch.inf).max())


class Recorded:
    """A dataclass of tensors that are stored under the names of its fields."""

    __dataclass_fields__: dict[str, Any]

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """Rebuild from the stored tensors.

        Raises:
            ArtifactError: a tensor is missing.
        """
        if missing := [name for name in cls.__dataclass_fields__ if name not in tensors]:
            raise ArtifactError(f"{GOLDEN} lacks {', '.join(missing)}; export the folder again")
        return cls(**{name: tensors[name] for name in cls.__dataclass_fields__})


G = TypeVar("G", bound=Recorded)


def replayed(folder: Path, kind: type[G], replay: Callable[[G], list[str]]) -> tuple[G | None, list[str]]:
    """Return what was recorded at export, if it can be read and replayed, and what differs from it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        golden = kind.from_tensors(load_file(folder / GOLDEN))
    except ArtifactError as error:
        return None, [str(error)]
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        return None, [f"{GOLDEN} cannot be read: {error}"]
    try:
        return golden, replay(golden)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return None, [f"{GOLDEN} cannot be replayed: {first_line(error)}"]


def heldout_tokens(target: Target, count: int) -> Tensor:
    """Return `count` tokens of a bundled held-out text; random ones if the target has no tokenizer."""
    if target.tokenizer is None:
        gen = torch.Generator().manual_seed(0)
        return torch.randint(target.info.vocab_size, (count,), generator=gen).to(target.device)
    file = sorted((asset_dir("bundled") / "text" / "heldout").glob("*.txt"))[0]
    text = file.read_text(encoding="utf-8")[4000 : 4000 + 12 * count]
    ids = target.tokenizer(text, add_special_tokens=False).input_ids[:count]
    return torch.tensor(ids, device=target.device)


def moved_layers(layers: list[int], last: int) -> dict[str, list[int]]:
    """Return the layers one lower and one higher, as far as they are in 0..last."""
    found = {}
    for shift, what in ((-1, "layer ids one lower"), (1, "layer ids one higher")):
        moved = [layer + shift for layer in layers]
        if min(moved) >= 0 and max(moved) <= last:
            found[what] = moved
    return found


def better(one_KR: Tensor, other_KR: Tensor) -> bool:
    """Return True if the first predictions are clearly right more often, bool."""
    gain_R = (one_KR.double() - other_KR.double()).mean(0)
    return float(gain_R.mean()) > max(CLEARLY, SIGMAS * float(gain_R.std()) / len(gain_R) ** 0.5)


def judged(hits_KR: Tensor, others: Mapping[str, Tensor], common: float) -> list[str]:
    """Return what is wrong with a draft that was tried on a text.

    Args:
        hits_KR: bool, where it predicts the target's likeliest token.
        others: the same with other interpretations of the folder, by name.
        common: share of the target's commonest prediction.
    """
    agree, wrong = float(hits_KR[0].double().mean()), []
    if agree <= common:
        wrong.append(
            f"the draft predicts {agree:.1%} of the target's tokens; always drafting the commonest "
            f"one gives {common:.1%}"
        )
    for what, other_KR in others.items():
        if better(other_KR, hits_KR):
            wrong.append(
                f"read with {what} the draft predicts {float(other_KR.double().mean()):.1%} instead of "
                f"{float(hits_KR.double().mean()):.1%}: the folder does not say what was trained"
            )
    return wrong
