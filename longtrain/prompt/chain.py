"""The jobs of one command, one after the other: all are checked before the first begins."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, Gathered
from longtrain.jobs import CONFIGURED, JOBS, KEPT, SHARED
from longtrain.log import on_first_rank
from longtrain.prompt import checks, following, interrupts, memory, naming
from longtrain.prompt.explain import explain_key, is_group
from longtrain.tables import printable

if TYPE_CHECKING:
    from omegaconf import DictConfig

FIXED = ("target", "decode", "select")
"""Groups whose keys are read one by one, and are all in their files."""


def run(cfg: DictConfig, given: Sequence[str]) -> None:
    """Do the job that the command's word names, else the one or more that `job` lists, in this process.

    With `dry_run=true` everything is checked and nothing is done.

    Args:
        cfg: the composed configuration.
        given: the words of the command line as Hydra reads them.

    Raises:
        ConfigError: `job` names something that is not a job, or a value is not allowed.
        ArtifactError: a job wants an artifact that is not there.
        SystemExit: with code 130, when Ctrl-C ended a job; what is kept has been said.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    choices, words = hydra.runtime.choices, plain_words(hydra.overrides.task)
    if cfg.name == naming.UNNAMED and not following.typed("name", words):  # our recipes have a name
        cfg.name = naming.usual_name(cfg, choices)
        if choices.get("recipe") and cfg.artifact is None and (made := checks.exported(cfg)):
            cfg.artifact = made[0] if len(made) == 1 else made
    if not following.typed("data.name", words) and (data := naming.data_name(cfg)):
        cfg.data.name = data
    if hydra.mode == RunMode.MULTIRUN:
        cfg.name = naming.swept_name(str(cfg.name), naming.swept(given, words), hydra.job.num)
    jobs = _asked(cfg, str(hydra.job.config_name), given)
    _refuse_added(words, jobs, given)
    first = on_first_rank()
    fitted = following.fit_text(cfg, jobs, words)
    if following.window_takes_minutes(cfg):
        checks.check(_steps(cfg, jobs), words)
    line, faults = following.fit_lengths(cfg, jobs, words)
    checks.check(_steps(cfg, jobs), words, faults)
    fitted += [*([line] if line else []), *memory.fit_memory(cfg, jobs, words)]
    steps = _steps(cfg, jobs)
    if first:
        sys.stderr.write("".join(f"longtrain: {line}\n" for line in fitted))
    if cfg.dry_run:
        _only_check(steps)
        return
    # before hours of another job, and before the configuration is printed
    _own_checks([(job, step) for job, step in steps if first or job in SHARED])
    interrupts.as_usual()
    done: list[str] = []
    for place, (job, step) in enumerate(steps):
        if not first and job not in SHARED:
            continue
        if step.artifact is None and "export" in jobs[:place] and (made := checks.exported(step)):
            step.artifact = made[0] if len(made) == 1 else made
        if first and not step.quiet:
            _show(step, job, words)
        try:
            importlib.import_module(JOBS[job][0]).run(step)
        except KeyboardInterrupt:
            _interrupted(step, job, done)
        except Exception as error:
            if interrupts.behind(error):
                _interrupted(step, job, done)
            if first and done:
                sys.stderr.write(
                    f"longtrain: {job} failed after {', '.join(done)}, of which all is kept; once the error "
                    f"below is mended, the same command goes on with {job}\n"
                )
            raise
        done.append(job)


def plain_words(overrides: Any) -> list[str]:
    """The overrides of a run as Hydra read them: `${...}` in them stays what it is."""
    from omegaconf import OmegaConf

    return [str(word) for word in OmegaConf.to_container(overrides, resolve=False) or ()]


def _asked(cfg: DictConfig, config_name: str, given: Sequence[str]) -> list[str]:
    worded = any(word.startswith("--config-name=") for word in given)
    asked = config_name if worded else cfg.job
    jobs = [asked] if isinstance(asked, str) else [str(job) for job in asked or ()]
    if wrong := [job for job in jobs if job not in JOBS]:
        raise ConfigError(f"unknown job '{wrong[0]}' in job={jobs}; known: {', '.join(JOBS)}")
    return jobs


def _refuse_added(words: list[str], jobs: list[str], given: Sequence[str]) -> None:
    """Refuse a key that `+` adds and nobody reads: Hydra adds whatever it is told to.

    Groups that are read as typed settings refuse it by themselves.

    Raises:
        ConfigError: the key, and what is near.
    """
    from omegaconf import OmegaConf

    for key in (word.lstrip("+").partition("=")[0] for word in words if word[:1] == "+"):
        first, _, rest = key.partition(".")
        if is_group(key) or (rest and first not in FIXED):
            continue
        if rest or not any(first in OmegaConf.load(asset_dir("conf") / f"{job}.yaml") for job in jobs):
            raise ConfigError(explain_key(key, given) or f"unknown key '{key}'")


def _steps(cfg: DictConfig, jobs: Sequence[str]) -> list[tuple[str, DictConfig]]:
    """Each job with its configuration as it stands."""
    return [(job, _with_own_keys(cfg, job)) for job in jobs]


def _with_own_keys(cfg: DictConfig, job: str) -> DictConfig:
    """The configuration with the keys that only this job has, which a chained job would miss."""
    from omegaconf import DictConfig, OmegaConf

    step = OmegaConf.load(asset_dir("conf") / f"{job}.yaml")
    if not isinstance(step, DictConfig):
        raise ConfigError(f"conf/{job}.yaml is not a mapping of keys; reinstall longtrain")
    del step["defaults"]
    OmegaConf.set_struct(cfg, False)
    step.merge_with(cfg, {"job": job})
    OmegaConf.set_struct(step, True)
    return step


def _only_check(steps: list[tuple[str, DictConfig]]) -> None:
    """What a job checks by itself before it works, for each; then one line, and no job is done."""
    _own_checks(steps)
    if not on_first_rank():
        return
    names = ", ".join(job for job, _ in steps)
    sys.stderr.write(
        f"dry run of {names}: no fault in what is checked before work begins; "
        "GPUs, memory and the rows of data are checked later\n"
    )


def _own_checks(steps: list[tuple[str, DictConfig]]) -> None:
    """What each job checks by itself before it works; all faults are told at once."""
    gathered = Gathered()
    for job, step in steps:
        own = getattr(importlib.import_module(JOBS[job][0]), "check", None)
        if own is not None:
            with gathered.one():
                own(step)
    gathered.tell()


def _show(cfg: DictConfig, job: str, words: Sequence[str]) -> None:
    """Say on stderr, so that a job's own output can be piped, what was typed and where all keys are."""
    from rich.console import Console

    recipe = [word for word in words if word.startswith("+recipe=")]
    typed = [word for word in words if word not in recipe and word != "quiet=false"]
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    console.rule(f"longtrain {job}: {printable(cfg.name)}")
    begun = f"{recipe[-1].lstrip('+')}" if recipe else "the defaults of this job"
    console.print(printable(f"{begun}{' with ' if typed else ''}{' '.join(typed)}"))
    kept = (
        f"{CONFIGURED[job].format(run_dir=Path(cfg.run_dir), suite=cfg.suite.name)}, or "
        if job in CONFIGURED
        else ""
    )
    console.print(printable(f"all keys: {kept}longtrain config {' '.join([job, *words])}"))


def _interrupted(cfg: DictConfig, job: str, done: list[str]) -> None:
    """Say what Ctrl-C left of a job and how to go on; the shell is told that the command did not end.

    Raises:
        SystemExit: with code 130.
    """
    kept = KEPT[job].format(run_dir=Path(cfg.run_dir), home=Path(cfg.home), suite=cfg.suite.name)
    before = f" after {', '.join(done)}, of which all is kept" if done else ""
    sys.stderr.write(f"\nlongtrain: {job} was interrupted{before}; {kept}\n")
    raise SystemExit(130)
