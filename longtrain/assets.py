"""Where the files that ship beside the code are: `conf`, `recipes`, `data_prep` and `bundled`."""

from pathlib import Path

from longtrain.errors import ConfigError

ASSETS = ("conf", "recipes", "data_prep", "bundled")
MANIFEST = "longtrain.json"
"""The file that makes a folder an artifact."""


def asset_dir(name: str) -> Path:
    """The folder of an asset: inside the installed wheel if it is there, else in the checkout.

    Args:
        name: one of `ASSETS`.

    Raises:
        ConfigError: the name is unknown, or the installation lacks the folder.
    """
    if name not in ASSETS:
        raise ConfigError(f"unknown asset folder '{name}'; known: {', '.join(ASSETS)}")
    package = Path(__file__).resolve().parent
    for folder in (package / "_assets" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"asset folder '{name}' is missing from this installation; "
        "run: pip install --force-reinstall longtrain"
    )


def bundled_artifacts() -> dict[str, Path]:
    """Artifacts for the bundled target that ship with the package: name -> folder."""
    return {file.parent.name: file.parent for file in asset_dir("bundled").glob(f"artifacts/*/{MANIFEST}")}
