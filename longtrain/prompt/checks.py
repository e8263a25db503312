"""What is wrong with a list of jobs, said before the first begins: values, and what a later job would lack.

Nothing that is right loads torch here, so that a mistake is told within a second.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import methods
from longtrain.assets import MANIFEST, artifact_kind, bundled_artifacts
from longtrain.data.config import DataConfig
from longtrain.errors import ArtifactError, ConfigError, Gathered, LongtrainError
from longtrain.files import read_json
from longtrain.jobs.features import settings_of as features_of
from longtrain.jobs.setup import NO_CUDA, NO_TARGET, TARGET_KEYS, artifact_names, plain, target_key
from longtrain.log import on_first_rank
from longtrain.prompt import suite_checks, word_checks
from longtrain.settings import (
    AUTO,
    Count,
    CountOrZero,
    Name,
    NotNegative,
    Text,
    Tokens,
    convert,
    one_of,
    read,
)
from longtrain.targets.at_hand import folder_of, is_gguf, is_hub_id
from longtrain.training import strategy
from longtrain.training.optim import Optim
from longtrain.training.settings import LoopConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

Check = Callable[["DictConfig"], None]

WRITES_NOTHING = ("list", "inspect", "generate", "serve", "demo", "plan")
"""Jobs that need no folder for outputs."""
REPEATED = ("recipe", "name", "home", "target", "method", "data", "optim", "trainer", "features", "seed")
"""Groups and keys of a command that training under the same name needs too."""


def check(
    steps: Sequence[tuple[str, DictConfig]],
    words: Sequence[str] = (),
    faults: Sequence[LongtrainError] = (),
) -> None:
    """Refuse jobs that cannot end well, before the first of them begins; all faults are told at once.

    Args:
        steps: job and its resolved configuration, in the order in which they are done.
        words: the overrides of the command line, for the advice.
        faults: what was found before, told together with these.

    Raises:
        ConfigError: a value that is not allowed, or a job that nothing was made for.
        ArtifactError: an artifact that is not there, and that no job before makes.
        Faults: several of these.
    """
    before: list[str] = []
    gathered = Gathered(faults)
    for job, cfg in steps:
        with gathered.one():
            _common(cfg)  # the others rest on these keys
            for part in _parts(job, cfg, words, before):
                with gathered.one():
                    part()
        before.append(job)
    gathered.tell()


def _parts(
    job: str, cfg: DictConfig, words: Sequence[str], before: Sequence[str]
) -> Iterator[Callable[[], None]]:
    """The checks of a job that comes after others."""
    yield partial(_target, cfg)
    if job not in WRITES_NOTHING:
        yield partial(_writable, cfg)
    for part in PARTS.get(job, ()):
        yield partial(part, cfg)
    if job == "export" and "train" not in before:
        yield partial(_exportable, cfg)
    elif job == "export":
        yield partial(_replaceable, cfg)
    if job in ("generate", "serve", "demo") or (job == "eval" and cfg.compare is None):
        yield partial(_brought, cfg, words, exported="export" in before)


def _brought(cfg: DictConfig, words: Sequence[str], *, exported: bool) -> None:
    """The artifacts that are named are there, or an export before makes them."""
    made = exported and _own(cfg)
    for name in artifact_names(cfg):
        if not (made and made in (_place(cfg, name), *_place(cfg, name).parents)):
            _there(cfg, name, words)
            _as_exported(cfg, name, words)


def exported(cfg: DictConfig) -> list[str]:
    """The artifacts that an export under the name of the run left: one, or one for each member.

    A method that trains a target leaves none.
    """
    own = Path(cfg.home) / "checkpoints" / str(cfg.name)
    return [str(file.parent) for file in (sorted(own.glob(MANIFEST)) or sorted(own.glob(f"*/{MANIFEST}")))]


def _common(cfg: DictConfig) -> None:
    convert(cfg.seed, int, "seed")
    convert(cfg.name, Name, "name")
    if cfg.get("data") and "name" in cfg.data:
        convert(cfg.data.name, Name, "data.name")
    for key in ("home", "run_dir"):
        convert(cfg[key], Text, key)
    convert(cfg.quiet, bool, "quiet")


def _target(cfg: DictConfig) -> None:
    """The keys of the target are right, and it is there if it is a folder."""
    for key in TARGET_KEYS:
        target_key(cfg, key)
    if cfg.target and cfg.target.path:
        where = str(cfg.target.path)
        place = Path(where).expanduser()
        there = where == "tiny" or (place.is_file() if is_gguf(where) else place.is_dir())
        if not there and not is_hub_id(where):
            folder_of(where)  # it says what is allowed


def _writable(cfg: DictConfig) -> None:
    """Folders can be made where outputs go: one is made for a moment, since permissions do not say it all."""
    for key in ("home", "run_dir"):
        folder = Path(cfg[key]).expanduser().absolute()
        there = next(one for one in (folder, *folder.parents) if os.access(one, os.F_OK))
        try:
            Path(tempfile.mkdtemp(prefix=".longtrain-", dir=there)).rmdir()
        except OSError as error:
            raise ConfigError(
                f"{key}={cfg[key]} cannot be written to ({there}: {error.strerror}); pass home=FOLDER, or "
                "set LONGTRAIN_HOME"
            ) from None


def _method(cfg: DictConfig) -> None:
    if cfg.method is not None:
        read(methods.config_class(str(cfg.method.name)), plain(cfg.method), "method", ignore=("name",))


def _trained(cfg: DictConfig) -> None:
    """A method is chosen, its settings are right, and it has a target where it needs one."""
    if cfg.method is None:
        raise ConfigError(
            "no method is chosen (method=null); pass +recipe=NAME, or method=NAME with one of: "
            f"{', '.join(methods.names())}"
        )
    _method(cfg)
    if not (cfg.target and cfg.target.path) and methods.get(str(cfg.method.name)).export is None:
        raise ConfigError(NO_TARGET)


def _training(cfg: DictConfig) -> None:
    """The groups that only training has are right."""
    optim = read(Optim, plain(cfg.optim), "optim")
    loop = read(LoopConfig, plain(cfg.trainer), "trainer")
    strategy.check(loop.strategy, precision=loop.precision, optimizer=optim.name)
    device = target_key(cfg, "device")
    if device not in (AUTO, loop.accelerator):
        raise ConfigError(
            f"target.device={device}: training puts the target where trainer.accelerator={loop.accelerator} "
            "and trainer.devices say; leave it out, and pass trainer=cpu, or trainer.devices=[1], say"
        )


def _begins(cfg: DictConfig) -> None:
    """What training starts from, or reads in the target's place, is there."""
    features_of(cfg)
    if cfg.init:
        _there(cfg, str(cfg.init))


def _cuda(cfg: DictConfig) -> None:
    """Refuse training on a GPU where no CUDA driver is; torch, which knows it all, is asked later.

    A dry run, which may be done where a job is sent from, only says so.
    """
    accelerator = str(cfg.trainer.get("accelerator"))
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


def _resume(cfg: DictConfig) -> None:
    resume = str(cfg.resume)
    if resume not in ("auto", "never") and not Path(resume).exists():
        raise ConfigError(
            f"no checkpoint at resume={resume}; allowed: auto, never or the path of a checkpoint"
        )


def _data(cfg: DictConfig) -> None:
    """The documents of a mixture; a method that reads its own corpus has other keys."""
    values = plain(cfg.get("data"))
    if isinstance(values, Mapping) and "sources" in values:
        from longtrain.data.read.files import need, place

        for source in DataConfig.parse(values).sources:
            if source.reader == "synthetic" or (source.optional and not source.where):
                continue
            where = need(source.where, source.reader)
            if (
                source.reader in ("text", "jsonl", "conversations") and on_first_rank()
            ):  # others read what it made
                place(where)


def _decode(cfg: DictConfig) -> None:
    kinds: dict[str, Any] = {
        "temperature": NotNegative,
        "top_k": CountOrZero,
        "max_new_tokens": Tokens,
        "keep": Count | None,
        "law": one_of([AUTO, "point", "iid", "no_replace"]),
        "shape": one_of([AUTO]) | tuple[Count, ...],
        "menu": tuple[tuple[Count, ...], ...] | None,
    }
    for key, kind in kinds.items():
        if key in cfg.decode:
            convert(plain(cfg.decode[key]), kind, f"decode.{key}")


def _as_exported(cfg: DictConfig, name: str, words: Sequence[str]) -> None:
    """Refuse typed keys of a method that are not those of its artifact, which keeps its own."""
    place = _place(cfg, name)
    file = (place if place.exists() else bundled_artifacts().get(name, place)) / MANIFEST
    keys = [word.partition("=")[0].removeprefix("method.") for word in words if word.startswith("method.")]
    if not keys or cfg.method is None or not file.is_file():
        return
    kind = methods.config_class(str(cfg.method.name))
    given: object = read(kind, plain(cfg.method), "method", ignore=("name",))
    try:
        manifest = read_json(file)
        if manifest["method"] != cfg.method.name:
            return
        kept: object = read(kind, methods.without_gone(manifest["config"]), "method")
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return  # a damaged artifact; whoever loads it says so
    for key in (key.partition(".")[0] for key in keys):
        if getattr(given, key) != getattr(kept, key):
            raise ConfigError(
                f"method.{key}={getattr(given, key)} is typed, and artifact {name} was exported with "
                f"{getattr(kept, key)}; leave it out, or train and export with it under another name="
            )


def _prompt(cfg: DictConfig) -> None:
    from longtrain.jobs import generate

    generate.check(cfg)


def _shown(cfg: DictConfig) -> None:
    from longtrain.jobs import generate

    generate.check_prompt_file(cfg)


def _plan(cfg: DictConfig) -> None:
    from longtrain.jobs import plan

    plan.check(cfg)


def _inspected(cfg: DictConfig) -> None:
    for name in artifact_names(cfg):
        _there(cfg, name)


def _alone(cfg: DictConfig) -> None:
    from longtrain.jobs import train

    train.refuse_second(cfg)


def _replaceable(cfg: DictConfig) -> None:
    """What stands where the trained modules will be written is an older artifact, or nothing."""
    if cfg.method is None or methods.trains_target(str(cfg.method.name)):
        return
    config: Any = read(
        methods.config_class(str(cfg.method.name)), plain(cfg.method), "method", ignore=("name",)
    )
    members = config.chosen() if hasattr(config, "chosen") else ("",)
    for folder in (_own(cfg) / name for name in members):
        artifact_kind(folder).refuse_other(folder)


def _apart(cfg: DictConfig) -> None:
    """An artifact goes beside others and not into one, which could not be exported again then."""
    own, base = _own(cfg), (Path(cfg.home) / "checkpoints").absolute()
    for folder in own.parents:
        if folder == base:
            break
        if (folder / MANIFEST).is_file():
            raise ConfigError(f"name={cfg.name} is a place in the artifact {folder}; choose another name")
    if own.exists() and not own.is_dir():
        raise ConfigError(f"name={cfg.name}: {own} is a file; move it, or choose another name")


PARTS: dict[str, tuple[Check, ...]] = {
    "prepare": (_data,),
    "train": (_alone, _trained, _training, _begins, _cuda, _resume, _data, word_checks.staged),
    "export": (_method, word_checks.exported, _apart),
    "eval": (suite_checks.evaluated, _method, _decode, word_checks.reported),
    "generate": (_prompt, _method, _decode),
    "serve": (_method, _decode),
    "demo": (_shown, _decode),
    "bench": (suite_checks.common_keys, _method, _decode),
    "plan": (_method, _plan),
    "inspect": (_inspected,),
}
"""Job -> what is checked of its configuration."""


def _exportable(cfg: DictConfig) -> None:
    """Something was trained under this name, unless the job is about a folder or an artifact."""
    own = _own(cfg)
    shipped = () if own.is_dir() else bundled_artifacts()
    named = [name for name in artifact_names(cfg) if _place(cfg, name) != own or name in shipped]
    again = cfg.format is not None or cfg.push is not None
    if cfg.verify is not None or (again and (named or own.is_dir())):
        return
    where = Path(cfg.run_dir) / "train" / "checkpoints"
    if not any(where.glob("*.ckpt")):
        raise ConfigError(f"nothing was trained under name={cfg.name}: no checkpoint in {where}; train first")


def _own(cfg: DictConfig) -> Path:
    return (Path(cfg.home) / "checkpoints" / str(cfg.name)).absolute()


def _place(cfg: DictConfig, name: str) -> Path:
    """Where an artifact of this name lies, or would lie."""
    below = Path(cfg.home) / "checkpoints" / name
    return (Path(name) if Path(name).is_dir() or name.startswith((".", "/", "~")) else below).absolute()


def _there(cfg: DictConfig, name: str, words: Sequence[str] = ()) -> None:
    """An artifact is in its place, or may be on the Hub.

    Raises:
        ArtifactError: it is not, and what makes it.
    """
    place, own = _place(cfg, name), _own(cfg)
    if place.exists() or name in (shipped := bundled_artifacts()):
        return
    mine = cfg.method is not None and own in (place, *place.parents)
    if not mine and (name.startswith("hub:") or (name.count("/") == 1 and name[0] not in "./~")):
        return
    there = sorted(file.parent.name for file in (Path(cfg.home) / "checkpoints").glob(f"*/{MANIFEST}"))
    known = f"there: {', '.join(there) or 'none'}"
    if not mine:
        raise ArtifactError(
            f"no artifact '{name}': neither a folder nor a name under {Path(cfg.home) / 'checkpoints'} "
            f"({known}), nor one that ships with longtrain ({', '.join(sorted(shipped))}); pass one that is "
            "there"
        )
    trained = any((Path(cfg.run_dir) / "train" / "checkpoints").glob("*.ckpt"))
    again = [word for word in words if word.lstrip("+").split("=")[0].split(".")[0] in REPEATED]
    make = ["longtrain export" if trained else "longtrain job=[train,export]", *again]
    raise ArtifactError(
        f"no artifact was exported under name={cfg.name} ({known}); make it: {' '.join(make)}, or pass "
        "artifact=NAME"
    )
