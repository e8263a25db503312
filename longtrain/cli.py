"""The command line: a job word picks the primary config, Hydra composes it, the job's `run(cfg)` does it."""

from __future__ import annotations

import importlib
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from longtrain import __version__
from longtrain.assets import asset_dir
from longtrain.errors import ConfigError
from longtrain.jobs import JOBS, SHARED

if TYPE_CHECKING:
    from omegaconf import DictConfig

TOP_HELP = """\
longtrain {version}: train, validate and ship the learned modules that make long-context LLM inference fast

Usage: longtrain [JOB] [+recipe=NAME] [GROUP=OPTION ...] [KEY=VALUE ...]     (or: python -m longtrain ...)

{jobs}
  recipes    list the recipes there are

Without a job word the recipe's own jobs run (train, unless it says otherwise).

  longtrain +recipe=quickstart
  longtrain eval +recipe=quickstart suite=acceptance lengths=[512,1k]
  longtrain generate +recipe=quickstart prompt="Once upon a time"

longtrain JOB --help lists groups, options, suites and keys; HYDRA_FULL_ERROR=1 shows where an error arose.
"""

FREE_TEXT = ("prompt",)
"""Keys whose value is taken as it is typed: it need not follow Hydra's grammar."""

VALUE_FLAGS: tuple[str, ...] = (
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--config-dir",
    "-cd",
    "--config-path",
    "-cp",
)
VALUE_FLAGS += ("--config-name", "-cn", "--info", "-i", "--shell-completion", "-sc", "--experimental-rerun")
"""Hydra's flags that take the next word as their value."""

KEY_FLAGS = ("--verify",)
"""Flags that may be typed for a key: `--verify FOLDER` is `verify=FOLDER`."""


def main() -> None:
    """Entry of `longtrain` and `python -m longtrain`; exits 0, 1 (the job failed) or 2 (no such words)."""
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in ("-h", "--help"):
        jobs = "\n".join(f"  {name:<10} {about}" for name, (_, about) in JOBS.items())
        _say(TOP_HELP.format(version=__version__, jobs=jobs))
    elif word in ("-V", "--version"):
        _say(f"longtrain {__version__}\n")
    elif word == "recipes":
        _say("".join(f"{name:<26} {about}\n" for name, about in recipes().items()))
    else:
        if word in JOBS:
            sys.argv[1] = f"--config-name={word}"  # stays when Lightning starts the other ranks with our argv
        sys.argv[1:] = _ordered(sys.argv[1:])
        _run_hydra()


def recipes() -> dict[str, str]:
    """Name of each recipe -> the first line of its header comment."""
    files = sorted(asset_dir("recipes").glob("*.yaml"))
    return {file.stem: file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for file in files}


def mount() -> None:
    """Put every recipe (`+recipe=NAME`) and method dataclass (`method=NAME`) into Hydra's ConfigStore.

    A recipe is a global override named after its file; it exports and evaluates under that name.
    """
    from omegaconf import OmegaConf

    from longtrain import methods

    _store(asset_dir("recipes"), tuple(methods.names()))
    OmegaConf.register_new_resolver("longtrain_about", lambda job: JOBS[job][1], replace=True)
    OmegaConf.register_new_resolver("longtrain_keys", keys_help, replace=True)
    OmegaConf.register_new_resolver("longtrain_suites", _suites_help, replace=True)


@cache
def _store(recipe_folder: Path, method_names: tuple[str, ...]) -> None:
    """Read recipes and methods into the ConfigStore, which belongs to the process: once is enough."""
    from dataclasses import field, make_dataclass

    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from longtrain import methods

    store = ConfigStore.instance()
    # Hydra copies all sources for each group that it lists, 120 times for a help, and again what it loads.
    vars(store)["__deepcopy__"] = lambda memo: store
    for file in sorted(recipe_folder.glob("*.yaml")):
        named = {"name": file.stem, "artifact": "${home}/checkpoints/${name}"}
        node = OmegaConf.merge(named, OmegaConf.load(file))
        store.store(group="recipe", name=file.stem, node=node, package="_global_", provider=file.name)
    for name in method_names:
        own = (methods.config_class(name),)
        schema = make_dataclass("Method", [("name", str, field(default=name))], bases=own)
        store.store(group="method", name=name, node=schema, provider="longtrain.methods")


def keys_help(job: str) -> str:
    """The keys of a job with their comments, as its YAML files have them, for Hydra's help template."""
    text = "".join((asset_dir("conf") / f"{name}.yaml").read_text(encoding="utf-8") for name in (job, "base"))
    text = re.sub(r"(?m)^(defaults|hydra):\n(?:[ \t]+.*\n)+|^#.*\n|^job: (?!train).*\n|^\s*\n", "", text)
    return "".join(f"  {line}\n" for line in text.splitlines()).replace("$", "$$")  # $ opens a field there


def _suites_help(job: str) -> str:
    """The job's suites, or the keys of the one on the command line, for Hydra's help template."""
    from longtrain.suite_help import suites_help

    text = suites_help(job, sys.argv[1:])
    return f"\n{text}".replace("$", "$$") if text else ""


def run_jobs(cfg: DictConfig) -> None:
    """Do the job that the command's word names, else the one or more that `job` lists, in this process.

    Raises:
        ConfigError: `job` names something that is not a job.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    worded = any(arg.startswith("--config-name=") for arg in sys.argv[1:])
    asked = str(hydra.job.config_name) if worded else cfg.job
    jobs = [asked] if isinstance(asked, str) else [str(job) for job in asked]
    if wrong := [job for job in jobs if job not in JOBS]:
        raise ConfigError(f"unknown job '{wrong[0]}' in job={jobs}; known: {', '.join(JOBS)}")
    if hydra.mode == RunMode.MULTIRUN:
        cfg.name = f"{cfg.name}_{hydra.job.num}"
    main_rank = all(int(os.environ.get(key) or 0) == 0 for key in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    for job in jobs:
        step = _with_own_keys(cfg, job)
        if not main_rank and job not in SHARED:
            continue
        if main_rank and not cfg.quiet:
            _show(step, job)
        importlib.import_module(JOBS[job][0]).run(step)


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


def _run_hydra() -> None:
    """Compose and run; every failure becomes one line unless HYDRA_FULL_ERROR is set."""
    import hydra

    from longtrain.explain import explain

    full = os.environ.get("HYDRA_FULL_ERROR")
    failures: list[Exception] = []

    def task(cfg: DictConfig) -> None:
        _set_full_error(full)
        try:
            run_jobs(cfg)
        except Exception as error:
            if full:
                raise
            failures.append(error)
        finally:
            _set_full_error("1")

    _set_full_error("1")  # Hydra then hands errors on instead of printing them its own way
    try:
        mount()
        hydra.main(version_base="1.3", config_path=str(asset_dir("conf")), config_name="train")(task)()
    except Exception as error:
        if full:
            raise
        failures.append(error)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        _set_full_error(full)
    for failure in failures:
        _complain(explain(failure))
    if failures:
        sys.exit(1)


def _ordered(words: list[str]) -> list[str]:
    """Flags with their values before overrides, as argparse needs them; exit 2 at any other word."""
    flags, overrides = [], []
    for before, word in zip(["", *words], words, strict=False):
        if before in KEY_FLAGS:
            overrides.append(f"{before.lstrip('-')}={word}")
        elif word in KEY_FLAGS:
            if word == words[-1]:
                _unknown_word(word)
        elif word[:1] == "-" or before in VALUE_FLAGS:
            flags.append(word)
        elif word[:1] in ("+", "~") or "=" in word:
            overrides.append(_quoted(word))
        else:
            _unknown_word(word)
    return [*flags, *overrides]


def _unknown_word(word: str) -> NoReturn:
    from longtrain.explain import near

    known = [*JOBS, "recipes"]
    if word in known:
        _complain(f"the job comes first: longtrain {word} ...")
    elif word in recipes():
        _complain(f"'{word}' is a recipe; write +recipe={word}")
    else:
        jobs = ", ".join(known)
        _complain(f"unknown word '{word}'{near(word, known)}; jobs: {jobs}; everything else is KEY=VALUE")
    sys.exit(2)


def _quoted(arg: str) -> str:
    """A free-text value in Hydra's quotes, so that commas, apostrophes and brackets may simply be typed."""
    key, _, value = arg.partition("=")
    if key.lstrip("+") not in FREE_TEXT or value == "null":
        return arg
    if len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]:
        return arg
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped).replace("${", "\\${")
    return f"{key}='{escaped}'"


def _show(cfg: DictConfig, job: str) -> None:
    """Print the resolved configuration to stderr, so that a job's own output can be piped."""
    from omegaconf import OmegaConf
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(stderr=True)
    console.rule(f"longtrain {job}: {cfg.name}")
    text = OmegaConf.to_yaml(cfg, resolve=True)
    console.print(Syntax(text, "yaml", theme="ansi_dark", background_color="default"))


def _set_full_error(value: str | None) -> None:
    os.environ.pop("HYDRA_FULL_ERROR", None)
    if value is not None:
        os.environ["HYDRA_FULL_ERROR"] = value


def _complain(line: str) -> None:
    print(f"longtrain: error: {line}", file=sys.stderr)


def _say(text: str) -> None:
    print(text, end="")
