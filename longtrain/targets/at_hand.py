"""Whether a target's files are on this machine, told without loading or fetching anything."""

from __future__ import annotations

from pathlib import Path

from longtrain.assets import asset_dir
from longtrain.errors import ArtifactError, ConfigError
from longtrain.targets.weights import weight_files


def folder_at_hand(where: str, *, weights: bool = True) -> Path:
    """The folder of a target that is on this machine: bundled, local, or fetched from the Hub before.

    Args:
        where: `tiny`, a folder or a Hub id.
        weights: whether the weights must be there too.

    Raises:
        ConfigError: nothing of that name is on this machine.
        ArtifactError: a file of the folder is missing.
    """
    folder = asset_dir("bundled") / "tiny" if where == "tiny" else Path(where).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(where, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, OSError):
            raise ConfigError(
                f"target.path={where} is not on this machine; pass a folder that every node sees, or fetch "
                f"it first with: hf download {where}"
            ) from None
    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{folder} has no config.json; get the folder again")
    if weights:
        weight_files(folder)
    return folder
