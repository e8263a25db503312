"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from longtrain.errors import ArtifactError


def written_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Write files into a new folder beside `folder`, flush them to disk, then put it in `folder`'s place.

    Args:
        folder: the result; replaced when it exists.
        files: content by file name, or path within the folder.

    Raises:
        ArtifactError: writing failed (disk full, no permission); `folder` is as it was before.
    """
    fresh = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        for name, content in files.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            with (fresh / name).open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        if folder.exists():
            folder.replace(old)
        try:
            fresh.replace(folder)
        except OSError:
            if old.exists():
                old.replace(folder)
            raise
    except OSError as error:
        raise ArtifactError(
            f"cannot write {folder}: {error.strerror or error}; what was there is unchanged; "
            "free space or pass home=FOLDER"
        ) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
