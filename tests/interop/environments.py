"""Virtual environments with other tools, made once in a cache folder that outlives a test run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

UNREACHABLE = (
    "No matching distribution",
    "Connection",
    "connection",
    "Temporary failure",
    "timed out",
    "ProxyError",
)
"""What pip says where an index cannot be reached, or does not have a package."""

TORCH = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Environment:
    """What is installed.

    Args:
        name: of the environment.
        needs: requirements, with what they need.
        alone: requirements installed without what they say that they need.
        unwanted: packages taken out again.
        pinned: sha256 of the wheel of a requirement; another one is refused.
    """

    name: str
    needs: tuple[str, ...]
    alone: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    pinned: tuple[tuple[str, str], ...] = ()

    def python(self) -> Path:
        """Its interpreter; the test is skipped, saying why, where it cannot be made."""
        what = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longtrain-tests"
        folder = cache / f"{self.name}-{what}"
        python = folder / "bin" / "python"
        if (folder / "ready").exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        wheels = [str(self._wheel(python, folder / name, sha256)) for name, sha256 in self.pinned]
        self._install(python, *self.needs, *wheels)
        if self.alone:
            self._install(python, "--no-deps", *self.alone)
        if self.unwanted:
            run(python, "-m", "pip", "uninstall", "--quiet", "-y", *self.unwanted)
        (folder / "ready").touch()
        return python

    def _wheel(self, python: Path, folder: Path, sha256: str) -> Path:
        """The one wheel of a requirement, downloaded to a folder of its name, as it was pinned."""
        self._pip(python, "download", "--no-deps", "--dest", str(folder), folder.name)
        (wheel,) = folder.iterdir()
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == sha256, f"{wheel.name} is not the pinned one"
        return wheel

    def _install(self, python: Path, *words: str) -> None:
        self._pip(python, "install", *words)

    def _pip(self, python: Path, *words: str) -> None:
        """Run pip; where it finds no torch, again with the index of torch's builds for CPUs."""
        for more in ((), ("--retries", "0", "--timeout", "15", "--extra-index-url", TORCH)):
            done = subprocess.run(
                ["nice", str(python), "-m", "pip", *words, "--quiet", *more],
                capture_output=True,
                text=True,
                timeout=1500,
            )
            if done.returncode == 0:
                return
            if "for torch" not in done.stderr:
                break
        if any(word in done.stderr for word in UNREACHABLE):
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no answer"]
            pytest.skip(f"the package index does not give {self.name}: {lines[-1]}")
        raise AssertionError(done.stderr)


def run(*words: str | Path, limit_s: int = 600, **environment: str) -> str:
    """Run a program that looks for nothing on the Hub; what it printed. The test fails where it does."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, **settings, **environment, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout
