"""Writes `config.yaml` and `provenance.json`, which record how a job's outputs were made, beside them."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from longtrain.files import read_text, sealed, write_files, write_text

PACKAGES = (
    "longtrain",
    "torch",
    "lightning",
    "transformers",
    "deepspeed",
    "triton",
    "liger-kernel",
    "flash-attn",
)

_SECRET_KEY = re.compile(
    r"(^|[_.-])(api_?key|access_?key|secret(_?key)?|private_?key|pass(word|wd|phrase)|credentials?"
    r"|(hf|auth|access|api|bearer|hub|wandb)_?token|token)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,})\b")
_FOLDERS = re.compile(r"(?<![\w:/.])~?/(?:[^\s/,:='\"\[\](){}]+/)+(?=[^\s/])")
_URL_LOGIN = re.compile(r"(\w+://)[^/\s:@]+:[^/\s@]+@")


def machine_name() -> str:
    """Return the machine's name: Slurm's node name inside a Slurm job, else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def write(folder: str | Path, config: Mapping[str, Any], **extra: Any) -> None:
    """Write `config.yaml` and `provenance.json` into a folder, each atomically.

    Args:
        folder: the folder, created if it is missing.
        config: the resolved configuration as plain containers; secrets are replaced by `***`.
        extra: further facts for `provenance.json`, JSON values (`data={"name": ..., "sha256": ...}`).

    Raises:
        LongtrainError: the folder cannot be written, or the disk is full.
    """
    import yaml

    folder = Path(folder)
    text = yaml.safe_dump(redact(dict(config)), sort_keys=False, allow_unicode=True, width=120)
    write_text(folder / "config.yaml", text)
    write_files(folder, {"provenance.json": sealed({**gather(), **redact(extra)})})


def read_config(folder: Path) -> dict[str, Any]:
    """Read the resolved configuration that `write` stored in a folder; `${...}` in it is plain text.

    Raises:
        OSError: the file is missing or not regular.
        ValueError: it is damaged.
    """
    import yaml

    try:
        found = yaml.safe_load(read_text(folder / "config.yaml"))
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(found, dict):
        raise ValueError("it is no mapping of keys")
    return found


def gather() -> dict[str, Any]:
    """Return the command, commit, package versions and hardware of this process, as JSON values."""
    return {
        "argv": [_redact_argument(arg) for arg in sys.argv],
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _git(),
        "versions": _versions(),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), **_gpus()},
    }


def redact(value: Any, key: str = "") -> Any:
    """Return a copy with secrets hidden: values of secret keys, known token formats, and logins in URLs."""
    if isinstance(value, Mapping):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if value not in (None, "", False) and isinstance(value, str) and _SECRET_KEY.search(key):
        return "***"
    if isinstance(value, str):
        return _URL_LOGIN.sub(r"\1***@", _SECRET_VALUE.sub("***", value))
    if isinstance(value, Path):
        return str(value)
    return value


def without_folders(value: Any) -> Any:
    """Return a copy with each absolute path cut to its last part, for files that will be published."""
    if isinstance(value, Mapping):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    return _FOLDERS.sub("", str(value)) if isinstance(value, str | Path) else value


def _redact_argument(argument: str) -> str:
    key, equals, value = argument.partition("=")
    return f"{key}{equals}{redact(value, key.lstrip('+~-'))}" if equals else redact(argument)


def _git() -> dict[str, Any] | None:
    """Return commit and dirty flag of the checkout that the package runs from; None for a wheel."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def ask(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "longtrain" not in found:
        from longtrain import __version__

        found["longtrain"] = __version__
    return found


def _gpus() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"gpus": [], "cuda": torch.version.cuda}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"gpus": names, "cuda": torch.version.cuda}


def commit_of(made: Mapping[str, Any]) -> str:
    """Return the commit in a `provenance.json` for display; empty if unknown."""
    git = made.get("git") or {}
    return f"{str(git.get('commit'))[:12]}{', changed' if git.get('dirty') else ''}" if git else ""


def machine_of(made: Mapping[str, Any]) -> str:
    """Return the GPU models in a `provenance.json`, each once, or CPU; empty if unknown."""
    about = made.get("machine") or {}
    return ", ".join(sorted({*map(str, about.get("gpus", []))})) or ("CPU" if about else "")


def typed_command(argv: Sequence[str]) -> str:
    """Return the command as it was typed; the command line turns the job word into a Hydra option."""
    program, *words = [str(word) for word in argv]
    program = "python -m longtrain" if program.endswith("__main__.py") else "longtrain"
    if words:
        words[0] = words[0].removeprefix("--config-name=")
    return " ".join([program, *(shlex.quote(word) for word in words)])
