"""Checks a list of jobs before the first begins: wrong values, and things that a later job would lack.

The checks do not import torch, so that mistakes are reported within a second.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from longtrain import methods
from longtrain.assets import MANIFEST, artifact_kind, bundled_artifacts, manifest_of
from longtrain.errors import ArtifactError, ConfigError, Gathered, LongtrainError
from longtrain.files import read_json
from longtrain.jobs import train_lock
from longtrain.jobs.setup import NO_CUDA
from longtrain.log import on_first_rank
from longtrain.prompt import suite_checks, word_checks
from longtrain.settings import AUTO, Name, convert, read
from longtrain.targets.at_hand import folder_of, is_gguf, is_hub_id
from longtrain.training import strategy

if TYPE_CHECKING:
    from longtrain.config import RunConfig

Check = Callable[["RunConfig"], None]

WRITES_NOTHING = ("list", "inspect", "generate", "serve", "demo", "plan")
"""Jobs that need no folder for outputs."""
REPEATED = ("recipe", "name", "home", "target", "method", "data", "optim", "trainer", "features", "seed")
"""Groups and keys of a command that must be repeated to train under the same name."""


def check(
    steps: Sequence[tuple[str, RunConfig]],
    words: Sequence[str] = (),
    faults: Sequence[LongtrainError] = (),
) -> None:
    """Refuse jobs that cannot succeed, before the first of them begins; all errors are reported together.

    Args:
        steps: jobs with their resolved configurations, in order.
        words: the overrides of the command line, for advice in messages.
        faults: earlier errors, to be reported together with these.

    Raises:
        ConfigError: a value is not allowed, or the input of a job is missing.
        ArtifactError: an artifact does not exist, and no earlier job makes it.
        Faults: several of these errors.
    """
    before: list[str] = []
    gathered = Gathered(faults)
    for job, cfg in steps:
        with gathered.one():
            _common(cfg)  # the other checks depend on these keys
            for part in _parts(job, cfg, words, before):
                with gathered.one():
                    part()
        before.append(job)
    gathered.raise_all()


def _parts(
    job: str, cfg: RunConfig, words: Sequence[str], before: Sequence[str]
) -> Iterator[Callable[[], None]]:
    """The checks of a job that follows other jobs."""
    yield partial(_target, cfg)
    if job not in WRITES_NOTHING:
        yield partial(_writable, cfg)
    for part in PARTS.get(job, ()):
        yield partial(part, cfg)
    if job == "export" and "train" not in before:
        yield partial(_exportable, cfg)
    elif job == "export":
        yield partial(_replaceable, cfg)
    if job in ("generate", "serve", "demo", "eval"):
        yield partial(_brought, cfg, words, exported="export" in before, compares=job == "eval")


def _brought(cfg: RunConfig, words: Sequence[str], *, exported: bool, compares: bool) -> None:
    """Check that the named artifacts exist, or that an earlier export makes them.

    Args:
        cfg: the job's configuration.
        words: of the command line.
        exported: an export comes before this job.
        compares: the job may be about two finished runs (`eval compare=`), and then needs none.
    """
    if compares and cfg.evaluation.compare is not None:
        return
    made = exported and _own(cfg)
    for name in cfg.artifacts:
        if not (made and made in (_place(cfg, name), *_place(cfg, name).parents)):
            _there(cfg, name, words)
            _as_exported(cfg, name, words)
        else:
            _of_member(cfg, name, made)


def _of_member(cfg: RunConfig, name: str, made: Path) -> None:
    """Refuse an artifact under a joint training's name that is not one of a member that it trains."""
    chosen = getattr(cfg.method.settings, "chosen", None) if cfg.method is not None else None
    if chosen is not None and (place := _place(cfg, name)) not in [made / one for one in chosen()]:
        shown = place.relative_to(cfg.checkpoints.absolute())
        listed = ",".join(f"{cfg.name}/{one}" for one in chosen())
        raise ConfigError(
            f"artifact={shown} is none of those that this joint training exports, one for each of "
            f"method.members; name some of them, artifact=[{listed}]"
        )


def exported(cfg: RunConfig) -> list[str]:
    """Names of the artifacts that an export under the run's name writes: one, or one for each member.

    A method that trains a target writes none.
    """
    own = cfg.checkpoints / cfg.name
    return [str(file.parent) for file in (sorted(own.glob(MANIFEST)) or sorted(own.glob(f"*/{MANIFEST}")))]


def _common(cfg: RunConfig) -> None:
    """Check the keys that every job has."""
    _ = cfg.seed, cfg.name
    if "name" in cfg.data_values:
        convert(cfg.data_values["name"], Name, "data.name")
    _ = cfg.home, cfg.run_dir, cfg.quiet


def _target(cfg: RunConfig) -> None:
    """Check the target's keys, and that a local folder exists."""
    if where := cfg.target.path:
        place = Path(where).expanduser()
        there = where == "tiny" or (place.is_file() if is_gguf(where) else place.is_dir())
        if not there and not is_hub_id(where):
            folder_of(where)  # the error lists what is allowed


def _writable(cfg: RunConfig) -> None:
    """Check that output folders can be created, by creating one temporarily: permission bits are not
    sufficient.
    """
    for key, place in (("home", cfg.home), ("run_dir", cfg.run_dir)):
        folder = place.expanduser().absolute()
        there = next(one for one in (folder, *folder.parents) if os.access(one, os.F_OK))
        try:
            Path(tempfile.mkdtemp(prefix=".longtrain-", dir=there)).rmdir()
        except OSError as error:
            raise ConfigError(
                f"{key}={cfg.values[key]} cannot be written to ({there}: {error.strerror}); pass "
                "home=FOLDER, or set LONGTRAIN_HOME"
            ) from None


def _method(cfg: RunConfig) -> None:
    """Check the method's settings, if one is chosen."""
    _ = cfg.method and cfg.method.settings


def _trained(cfg: RunConfig) -> None:
    """Check that a method is chosen, that its settings are valid, and that it has a target if it
    needs one.
    """
    method = cfg.trained_method
    _ = method.settings
    if not methods.trains_target(method.name):
        cfg.target.required_path()


def _training(cfg: RunConfig) -> None:
    """Check the groups that only training reads."""
    gathered = Gathered()
    with gathered.one():
        optim = cfg.optim
    with gathered.one():
        loop = cfg.trainer
    gathered.raise_all()
    strategy.check(loop.strategy, precision=loop.precision, optimizer=optim.name)
    device = cfg.target.device
    if device not in (AUTO, loop.accelerator):
        raise ConfigError(
            f"target.device={device}: training puts the target where trainer.accelerator={loop.accelerator} "
            "and trainer.devices say; leave it out, and pass trainer=cpu, or trainer.devices=[1], say"
        )


def _begins(cfg: RunConfig) -> None:
    """Check that the artifact or stored features that training starts from exist."""
    cfg.features.check_states()
    if cfg.init:
        _there(cfg, cfg.init)


def _cuda(cfg: RunConfig) -> None:
    """Refuse GPU training without a CUDA driver; torch, which knows more, is asked later.

    A dry run, which may be run on a login node, only prints a note.
    """
    accelerator = cfg.values["trainer"].get("accelerator")
    if accelerator not in ("cuda", "gpu") or sys.platform != "linux":
        return
    if "rocm" in version("torch"):
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if not cfg.dry_run:
            raise ConfigError(NO_CUDA.format(accelerator)) from None
        sys.stderr.write(f"longtrain: here a run would be refused: {NO_CUDA.format(accelerator)}\n")


def _resume(cfg: RunConfig) -> None:
    resume = cfg.resume
    if resume not in ("auto", "never") and not Path(resume).exists():
        raise ConfigError(
            f"no checkpoint at resume={resume}; allowed: auto, never or the path of a checkpoint"
        )


def _data(cfg: RunConfig) -> None:
    """Check the documents of a mixture; a method with its own corpus has other keys."""
    if "sources" in cfg.data_values:
        from longtrain.data.read.files import need, place

        for source in cfg.data.sources:
            if source.reader == "synthetic" or (source.optional and not source.where):
                continue
            where = need(source.where, source.reader)
            if (
                source.reader in ("text", "jsonl", "conversations") and on_first_rank()
            ):  # other jobs read the prepared data
                place(where)


def _decode(cfg: RunConfig) -> None:
    """Check the keys of `decode`."""
    _ = cfg.decode


def _as_exported(cfg: RunConfig, name: str, words: Sequence[str]) -> None:
    """Refuse method keys that differ from an artifact's stored settings, which cannot be changed."""
    file = manifest_of(name, cfg.checkpoints)
    keys = [word.partition("=")[0].removeprefix("method.") for word in words if word.startswith("method.")]
    if not keys or cfg.method is None or file is None:
        return
    kind, given = methods.config_class(cfg.method.name), cfg.method.settings
    try:
        manifest = read_json(file)
        if manifest["method"] != cfg.method.name:
            return
        kept: object = read(kind, methods.without_gone(manifest["config"]), "method")
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return  # a damaged artifact raises an error when it is loaded
    for key in (key.partition(".")[0] for key in keys):
        if getattr(given, key) != getattr(kept, key):
            raise ConfigError(
                f"method.{key}={getattr(given, key)} is typed, and artifact {name} was exported with "
                f"{getattr(kept, key)}; leave it out, or train and export with it under another name="
            )


def _prompt(cfg: RunConfig) -> None:
    from longtrain.jobs import generate

    generate.check(cfg)


def _shown(cfg: RunConfig) -> None:
    from longtrain.jobs import generate

    generate.check_prompt_file(cfg.generate)


def _plan(cfg: RunConfig) -> None:
    from longtrain.jobs import plan

    plan.check(cfg)


def _inspected(cfg: RunConfig) -> None:
    for name in cfg.artifacts:
        if name != "tiny":  # the bundled target, which no folder or file is named after
            _there(cfg, name)


def _alone(cfg: RunConfig) -> None:
    train_lock.refuse_running(cfg.name, cfg.run_dir)


def _replaceable(cfg: RunConfig) -> None:
    """Check that the export path holds an older artifact, or nothing."""
    if cfg.method is None or methods.trains_target(cfg.method.name):
        return
    config = cfg.method.settings
    members = config.chosen() if hasattr(config, "chosen") else ("",)
    for folder in (_own(cfg) / name for name in members):
        artifact_kind(folder).refuse_other(folder)


def _apart(cfg: RunConfig) -> None:
    """Check that an artifact is not exported into another artifact's folder, which would block its next
    export.
    """
    own, base = _own(cfg), cfg.checkpoints.absolute()
    for folder in own.parents:
        if folder == base:
            break
        if (folder / MANIFEST).is_file():
            raise ConfigError(f"name={cfg.name} is a place in the artifact {folder}; choose another name")
    if own.exists() and not own.is_dir():
        raise ConfigError(f"name={cfg.name}: {own} is a file; move it, or choose another name")


PARTS: dict[str, tuple[Check, ...]] = {
    "prepare": (_data,),
    "answers": (_data, _decode),
    "train": (_alone, _trained, _training, _begins, _cuda, _resume, _data, word_checks.staged),
    "export": (_method, word_checks.exported, _apart),
    "eval": (suite_checks.evaluated, _method, _decode),
    "generate": (_prompt, _method, _decode),
    "serve": (_method, _decode),
    "demo": (_shown, _decode),
    "bench": (suite_checks.common_keys, _method, _decode),
    "plan": (_method, _plan),
    "inspect": (_inspected,),
}
"""Job -> the checks of its configuration."""


def _exportable(cfg: RunConfig) -> None:
    """Check that a module was trained under this name, unless the job names a folder or an artifact."""
    own = _own(cfg)
    shipped = () if own.is_dir() else bundled_artifacts()
    named = [name for name in cfg.artifacts if _place(cfg, name) != own or name in shipped]
    again = cfg.export.format is not None or cfg.push is not None
    if cfg.export.verify is not None or (again and (named or own.is_dir())):
        return
    where = cfg.run_dir / "train" / "checkpoints"
    if not any(where.glob("*.ckpt")):
        raise ConfigError(f"nothing was trained under name={cfg.name}: no checkpoint in {where}; train first")


def _own(cfg: RunConfig) -> Path:
    return (cfg.checkpoints / cfg.name).absolute()


def _place(cfg: RunConfig, name: str) -> Path:
    """The path of an artifact of this name, existing or not."""
    below = cfg.checkpoints / name
    return (Path(name) if Path(name).is_dir() or name.startswith((".", "/", "~")) else below).absolute()


def _there(cfg: RunConfig, name: str, words: Sequence[str] = ()) -> None:
    """Check that an artifact exists locally, or may be on the Hub."""
    place, own = _place(cfg, name), _own(cfg)
    if place.exists() or name in (shipped := bundled_artifacts()):
        return
    mine = cfg.method is not None and own in (place, *place.parents)
    if not mine and (name.startswith("hub:") or (name.count("/") == 1 and name[0] not in "./~")):
        return
    there = sorted(file.parent.name for file in cfg.checkpoints.glob(f"*/{MANIFEST}"))
    known = f"there: {', '.join(there) or 'none'}"
    if not mine:
        raise ArtifactError(
            f"no artifact '{name}': neither a folder nor a name under {Path(cfg.home) / 'checkpoints'} "
            f"({known}), nor one that ships with longtrain ({', '.join(sorted(shipped))}); pass one that is "
            "there"
        )
    trained = any((cfg.run_dir / "train" / "checkpoints").glob("*.ckpt"))
    again = [word for word in words if word.lstrip("+").split("=")[0].split(".")[0] in REPEATED]
    make = ["longtrain export" if trained else "longtrain job=[train,export]", *again]
    raise ArtifactError(
        f"no artifact was exported under name={cfg.name} ({known}); make it: {' '.join(make)}, or pass "
        "artifact=NAME"
    )
