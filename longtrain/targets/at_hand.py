"""Where a target's files are: bundled, in a folder, in a GGUF file, or on the Hub."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from longtrain.assets import asset_dir
from longtrain.errors import ArtifactError, ConfigError, refusal

CARD = "README.md"
HUB_FILES = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer.model",
    "merges.txt",
    "pytorch_model*.bin",
    CARD,
]
"""What is fetched of a target on the Hub."""


def is_gguf(where: str | Path) -> bool:
    """Whether a target is named by a GGUF file."""
    return str(where).lower().endswith(".gguf") and not Path(where).expanduser().is_dir()


def folder_of(where: str | Path, *, fetch: bool = True) -> Path:
    """The local folder of a target; that of a GGUF file is made the first time (`targets.stored.gguf`).

    Args:
        where: `tiny`, a folder, a `.gguf` file or a Hub id.
        fetch: whether a Hub id may be fetched; False: it must have been fetched before.

    Raises:
        ConfigError: there is no such folder, file or Hub id.
        ArtifactError: a GGUF file cannot be read.
        TargetMismatchError: a GGUF file holds a model that is not supported.
    """
    if str(where) == "tiny":
        folder = asset_dir("bundled") / "tiny"
        if not folder.is_dir():
            raise ConfigError(
                f"the bundled target is missing ({folder}); train it with: longtrain +recipe=target_tiny"
            )
        return folder
    folder = Path(where).expanduser()
    if folder.is_dir():
        return folder
    text = str(where)
    if is_gguf(where) and folder.is_file():
        from longtrain.targets.stored.gguf import dequantised

        return dequantised(folder)
    if not is_hub_id(text):
        what = "is a file" if folder.is_file() else "does not exist"
        raise refusal(
            ConfigError,
            f"target.path={text} {what}",
            "a target folder, a .gguf file, a Hub id (org/name), or tiny",
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=HUB_FILES, local_files_only=not fetch))
    except Exception as error:
        if not fetch:
            raise ConfigError(
                f"target.path={text} is not on this machine; pass a folder that every node sees, or fetch it "
                f"first with: hf download {text}"
            ) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"target.path={text}: no such folder here ({folder.absolute()}), and the model hub gave no such "
            f"model ({reason}); pass target.path=FOLDER (its config.json, safetensors and tokenizer) or "
            f"target.path=FILE.gguf, or fetch it where there is a network: hf download {text}"
        ) from error


def is_hub_id(where: str) -> bool:
    """Whether a target that is nothing on this machine may be one of the Hub: ORG/NAME."""
    named = where.count("/") == 1 and where[0] not in "./~" and not is_gguf(where)
    return named and not Path(where).expanduser().exists()


def fetch_config(where: str) -> None:
    """Fetch the config.json of a target on the Hub, so that its shape is known before its weights are there.

    Nothing is said where the Hub does not give it: whoever loads the target does.

    Args:
        where: a Hub id.
    """
    from huggingface_hub import hf_hub_download

    with suppress(Exception):
        hf_hub_download(where, "config.json")


def folder_at_hand(where: str, *, weights: bool = True) -> Path:
    """The folder of a target that is on this machine, its files checked without loading or fetching anything.

    Args:
        where: `tiny`, a folder, a `.gguf` file or a Hub id.
        weights: whether the weights must be there too.

    Raises:
        ConfigError: nothing of that name is on this machine.
        ArtifactError: a file of the folder is missing.
        TargetMismatchError: the weights are quantised by a method that is not read.
    """
    folder = folder_of(where, fetch=False)
    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{folder} has no config.json; get the folder again")
    if weights:
        from longtrain.targets.config_file import read_object
        from longtrain.targets.stored.files import weight_files
        from longtrain.targets.stored.quantised import Quantisation

        weight_files(folder)
        Quantisation.of(read_object(folder / "config.json"), where)
    return folder


def source_of(folder: Path) -> dict[str, str]:
    """Which weights a target's folder has, as far as its files say it; artifacts and results keep it.

    Returns: `gguf`, `sha256` and `quantisation` of the GGUF file that it was made of, or `hub_revision` of a
        folder from the Hub; or nothing.
    """
    from longtrain.targets.stored.gguf import RECORD, record_of

    if (folder / RECORD).is_file():
        return record_of(folder)
    return {"hub_revision": revision} if (revision := _revision(folder)) else {}


def _revision(folder: Path) -> str:
    """The commit that a folder of the Hub's cache, or one that `hf download` made, was fetched at."""
    if folder.parent.name == "snapshots":
        return folder.name
    try:
        stamp = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
        return stamp.read_text(encoding="utf-8").split()[0]
    except (OSError, ValueError, IndexError):
        return ""


def licence_of(where: str) -> str | None:
    """The licence that the card of a target on this machine states; None: it has no card, or states none.

    Args:
        where: `tiny`, a folder or a Hub id.
    """
    import yaml

    try:
        text = (folder_of(where, fetch=False) / CARD).read_text(encoding="utf-8")
        front = yaml.safe_load(text.split("---\n", 2)[1]) if text.startswith("---\n") else {}
        return str(front.get("license_name") or front["license"])
    except (ConfigError, OSError, ValueError, KeyError, IndexError, AttributeError, yaml.YAMLError):
        return None
