"""Token ids of text by kind, kept in files instead of memory, for sources that write into this text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np
from numpy.typing import NDArray


class KeptText:
    """Appends documents' token ids to a file for each text kind; the files vanish with the object.

    Args:
        folder: an existing folder on a disk with room for four bytes a token.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, IO[bytes]] = {}

    def add(self, kind: str, ids_T: NDArray[np.integer]) -> None:
        """Append a document.

        Raises:
            OSError: the disk is full.
        """
        file = self._files.get(kind)
        if file is None:
            file = self._files[kind] = TemporaryFile(dir=self.folder, buffering=1 << 20)  # noqa: SIM115
        file.write(np.ascontiguousarray(ids_T, np.int32).tobytes())

    def streams(self) -> Mapping[str, NDArray[np.int32]]:
        """Return all ids of each kind, end to end, int32, as memory maps."""
        found: dict[str, NDArray[np.int32]] = {}
        for kind, file in self._files.items():
            file.flush()
            if file.tell():
                found[kind] = np.memmap(file, np.int32, mode="r")
        return found
