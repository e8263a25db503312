"""Locates a target's files: bundled, in a folder, in a GGUF file, or on the Hub."""

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
"""Patterns of the files that are downloaded from the Hub."""


def is_gguf(where: str | Path) -> bool:
    """Return True if a target is given as a GGUF file."""
    return str(where).lower().endswith(".gguf") and not Path(where).expanduser().is_dir()


def folder_of(where: str | Path, *, fetch: bool = True) -> Path:
    """Return the local folder of a target; a GGUF file's is made on first use (`targets.stored.gguf`).

    Args:
        where: `tiny`, a folder, a `.gguf` file or a Hub id.
        fetch: True if a Hub id may be downloaded; False: it must have been downloaded before.

    Raises:
        ConfigError: there is no such folder, file or Hub id.
        ArtifactError: a GGUF file cannot be read.
        TargetMismatchError: a GGUF file has a model that is not supported.
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
    """Return True if a target that is not on this machine may be a Hub id: ORG/NAME."""
    named = where.count("/") == 1 and where[0] not in "./~" and not is_gguf(where)
    return named and not Path(where).expanduser().exists()


def fetch_config(where: str) -> None:
    """Download the config.json of a Hub target, so that its shape is known before its weights are there.

    Errors are ignored: loading the target reports them.

    Args:
        where: a Hub id.
    """
    from huggingface_hub import hf_hub_download

    with suppress(Exception):
        hf_hub_download(where, "config.json")


def folder_at_hand(where: str, *, weights: bool = True) -> Path:
    """Return the folder of a target on this machine, checking its files without loading or downloading.

    Args:
        where: `tiny`, a folder, a `.gguf` file or a Hub id.
        weights: True if the weights must be there too.

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
    """Identify the weights of a target's folder as far as its files do; stored in artifacts and results.

    Returns:
        `gguf`, `sha256` and `quantisation` of the GGUF file that it was made of, or `hub_revision` of a
        folder from the Hub; or an empty dict.
    """
    from longtrain.targets.stored.gguf import RECORD, record_of

    if (folder / RECORD).is_file():
        return record_of(folder)
    return {"hub_revision": revision} if (revision := _revision(folder)) else {}


def _revision(folder: Path) -> str:
    """Return the commit at which a folder of the Hub's cache, or of `hf download`, was downloaded; or ""."""
    if folder.parent.name == "snapshots":
        return folder.name
    try:
        stamp = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
        return stamp.read_text(encoding="utf-8").split()[0]
    except (OSError, ValueError, IndexError):
        return ""


def licence_of(where: str) -> str | None:
    """Return the licence in the model card of a target on this machine; None if there is none.

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
