"""Runs the jobs of one command in order, after all of them were checked."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from longtrain.assets import asset_dir
from longtrain.config import RunConfig
from longtrain.errors import ConfigError, Gathered
from longtrain.jobs import CONFIGURED, JOBS, KEPT, SHARED
from longtrain.log import on_first_rank
from longtrain.prompt import checks, following, interrupts, memory, naming
from longtrain.prompt.explain import explain_key, is_group
from longtrain.tables import printable

if TYPE_CHECKING:
    from omegaconf import DictConfig

Step = tuple[str, RunConfig]
"""A job's name, and its configuration."""
FIXED = ("target", "decode", "select")
"""Groups whose keys are all listed in their files, so that unknown keys can be refused."""


def run(cfg: DictConfig, given: Sequence[str]) -> None:
    """Run the job that the command's first word names, or else those that `job` lists, in this process.

    With `dry_run=true` everything is checked and nothing is run.

    Args:
        cfg: the composed configuration.
        given: the words of the command line in the form Hydra reads.

    Raises:
        ConfigError: `job` contains an unknown job, or a value is not allowed.
        ArtifactError: a job needs an artifact that does not exist.
        SystemExit: with code 130 after Ctrl-C; a message has listed what was kept.
    """
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    words, first = plain_words(hydra.overrides.task), on_first_rank()
    _name(cfg, given, words)
    jobs = _asked(cfg, str(hydra.job.config_name), given)
    _refuse_added(words, jobs, given)
    steps, fitted = _fitted(cfg, jobs, words)
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
        if "export" in jobs[:place] and step.values["artifact"] is None and (made := checks.exported(step)):
            step = step.having(artifact=made[0] if len(made) == 1 else made)
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


def _name(cfg: DictConfig, given: Sequence[str], words: Sequence[str]) -> None:
    """Set the names of the run, its data and its artifact that the command does not set."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra, run = HydraConfig.get(), RunConfig.from_hydra(cfg)
    choices = hydra.runtime.choices
    if cfg.name == naming.UNNAMED and not following.typed("name", words):  # our recipes set a name
        cfg.name = naming.usual_name(run, choices)
        run = RunConfig.from_hydra(cfg)
        if choices.get("recipe") and cfg.artifact is None and (made := checks.exported(run)):
            cfg.artifact = made[0] if len(made) == 1 else made
    if not following.typed("data.name", words) and (data := naming.data_name(run)):
        cfg.data.name = data
    if hydra.mode == RunMode.MULTIRUN:
        cfg.name = naming.swept_name(str(cfg.name), naming.swept(given, words), hydra.job.num)


def _fitted(cfg: DictConfig, jobs: Sequence[str], words: Sequence[str]) -> tuple[list[Step], list[str]]:
    """Adapt values of recipes and defaults to the text, the target's context window and the available memory.

    Returns:
        Each job with its checked configuration; and lines that report the changes.
    """
    lines = following.fit_text(cfg, jobs, words)
    if following.window_takes_minutes(RunConfig.from_hydra(cfg)):
        checks.check(_steps(cfg, jobs), words)
    line, faults = following.fit_lengths(cfg, jobs, words)
    checks.check(_steps(cfg, jobs), words, faults)
    lines += [*([line] if line else []), *memory.fit_memory(cfg, jobs, words)]
    return _steps(cfg, jobs), lines


def plain_words(overrides: Any) -> list[str]:
    """The overrides of a run as parsed by Hydra, with `${...}` unresolved."""
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
    """Refuse a key added with `+` that no code reads, since Hydra accepts any key there.

    Groups parsed as typed settings refuse unknown keys by themselves.
    """
    from omegaconf import OmegaConf

    for key in (word.lstrip("+").partition("=")[0] for word in words if word[:1] == "+"):
        first, _, rest = key.partition(".")
        if is_group(key) or (rest and first not in FIXED):
            continue
        if rest or not any(first in OmegaConf.load(asset_dir("conf") / f"{job}.yaml") for job in jobs):
            raise ConfigError(explain_key(key, given) or f"unknown key '{key}'")


def _steps(cfg: DictConfig, jobs: Sequence[str]) -> list[Step]:
    """Each job with its configuration."""
    return [(job, RunConfig.from_hydra(_with_own_keys(cfg, job))) for job in jobs]


def _with_own_keys(cfg: DictConfig, job: str) -> DictConfig:
    """The configuration with the keys that only this job has, which a job listed in `job=` would otherwise
    lack.
    """
    from omegaconf import DictConfig, OmegaConf

    step = OmegaConf.load(asset_dir("conf") / f"{job}.yaml")
    assert isinstance(step, DictConfig)
    del step["defaults"]
    OmegaConf.set_struct(cfg, False)
    step.merge_with(cfg, {"job": job})
    OmegaConf.set_struct(step, True)
    return step


def _only_check(steps: list[Step]) -> None:
    """Run each job's own checks, print one line, and run no job."""
    _own_checks(steps)
    if not on_first_rank():
        return
    names = ", ".join(job for job, _ in steps)
    sys.stderr.write(
        f"dry run of {names}: no error in what is checked before work begins; "
        "GPUs, memory and the content of data are checked later\n"
    )


def _own_checks(steps: list[Step]) -> None:
    """Run each job's own checks; all errors are reported together."""
    gathered = Gathered()
    for job, step in steps:
        own = getattr(importlib.import_module(JOBS[job][0]), "check", None)
        if own is not None:
            with gathered.one():
                own(step)
    gathered.raise_all()


def _show(cfg: RunConfig, job: str, words: Sequence[str]) -> None:
    """Print the typed overrides and the path of the full configuration to stderr, so that stdout can be
    piped.
    """
    from rich.console import Console

    recipe = [word for word in words if word.startswith("+recipe=")]
    typed = [word for word in words if word not in recipe and word != "quiet=false"]
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    console.rule(f"longtrain {job}: {printable(cfg.name)}")
    begun = f"{recipe[-1].lstrip('+')}" if recipe else "the defaults of this job"
    console.print(printable(f"{begun}{' with ' if typed else ''}{' '.join(typed)}"))
    kept = (
        f"{CONFIGURED[job].format(run_dir=cfg.run_dir, suite=cfg.suite.name)}, or "
        if job in CONFIGURED
        else ""
    )
    console.print(printable(f"all keys: {kept}longtrain config {shlex.join([job, *words])}"))


def _interrupted(cfg: RunConfig, job: str, done: list[str]) -> None:
    """After Ctrl-C, report what a job left and how to continue, and exit with an error code."""
    kept = KEPT[job].format(run_dir=cfg.run_dir, home=cfg.home, suite=cfg.suite.name)
    before = f" after {', '.join(done)}, of which all is kept" if done else ""
    sys.stderr.write(f"\nlongtrain: {job} was interrupted{before}; {kept}\n")
    raise SystemExit(130)
