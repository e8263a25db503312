"""The command line: a job word picks the primary config, Hydra composes it, and the job's `run(cfg)` is called."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from longtrain import __version__
from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, LongtrainError
from longtrain.jobs import JOBS

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

longtrain JOB --help lists groups, options and keys; HYDRA_FULL_ERROR=1 shows the traceback of an error.
"""

FREE_TEXT = ("prompt",)
"""Keys whose value is taken as it is typed: it need not follow Hydra's grammar."""


def main() -> None:
    """Entry of `longtrain` and `python -m longtrain`; exits 0, 1 (the job failed) or 2 (the words make no sense)."""
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in ("-h", "--help"):
        _say(
            TOP_HELP.format(version=__version__, jobs="\n".join(f"  {k:<10} {v[1]}" for k, v in JOBS.items()))
        )
        sys.exit(0)
    if word in ("-V", "--version"):
        _say(f"longtrain {__version__}\n")
        sys.exit(0)
    if word == "recipes":
        _say("".join(f"{name:<28} {about}\n" for name, about in recipes().items()))
        sys.exit(0)
    if word in JOBS:
        sys.argv[1] = (
            f"--config-name={word}"  # a flag survives when Lightning starts the other ranks with our argv
        )
    for bare in (
        arg for arg in sys.argv[1:] if arg[0] not in "-+~" and "=" not in arg and not _is_value(arg)
    ):
        _unknown_word(bare)
    sys.argv[1:] = [_quoted(arg) for arg in sys.argv[1:]]
    _run_hydra()


def recipes() -> dict[str, str]:
    """Name of each recipe -> the first line of its header comment."""
    files = sorted(asset_dir("recipes").glob("*.yaml"))
    return {file.stem: file.read_text().splitlines()[0].lstrip("# ") for file in files}


def mount() -> None:
    """Put every recipe (`+recipe=NAME`) and every method's dataclass (`method=NAME`) into Hydra's ConfigStore.

    A recipe is a global override named after its file; it evaluates and exports under that name unless it says where.
    """
    from dataclasses import field, make_dataclass

    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from longtrain import methods

    store = ConfigStore.instance()
    for file in sorted(asset_dir("recipes").glob("*.yaml")):
        node = OmegaConf.load(file)
        named = {"name": file.stem, "artifact": "${home}/checkpoints/${name}"}
        store.store(
            group="recipe",
            name=file.stem,
            node=OmegaConf.merge(named, node),
            package="_global_",
            provider=file.name,
        )
    for name in methods.names():
        schema = make_dataclass(
            "Method", [("name", str, field(default=name))], bases=(methods.config_class(name),)
        )
        store.store(group="method", name=name, node=schema, provider="longtrain.methods")
    if not OmegaConf.has_resolver("longtrain_about"):
        OmegaConf.register_new_resolver("longtrain_about", lambda job: JOBS[job][1] if job in JOBS else job)
        OmegaConf.register_new_resolver("longtrain_keys", keys_help)


def keys_help(job: str) -> str:
    """The keys of a job with their comments, as its YAML files have them; `$` doubled for Hydra's help template."""
    conf = asset_dir("conf")
    text = [(conf / f"{name}.yaml").read_text() for name in (job, "base")]
    bodies = [re.sub(r"(?m)^(defaults|hydra):\n(?:[ \t]+.*\n)+", "", part) for part in text]
    lines = [line for line in "\n".join(bodies).splitlines() if line.strip() and not line.startswith("#")]
    return "\n".join(f"  {line}" for line in lines).replace("$", "$$") + "\n"


def run_jobs(cfg: DictConfig) -> None:
    """Do the job that the command's word names, else the one or more that `job` lists, in this process.

    Raises:
        ConfigError: `job` names something that is not a job.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf, open_dict

    hydra = HydraConfig.get()
    worded = any(arg.startswith("--config-name=") for arg in sys.argv[1:])
    jobs = [hydra.job.config_name] if worded else [cfg.job] if isinstance(cfg.job, str) else list(cfg.job)
    if wrong := [job for job in jobs if job not in JOBS]:
        raise ConfigError(f"unknown job '{wrong[0]}' in job={jobs}; known: {', '.join(JOBS)}")
    if hydra.mode == RunMode.MULTIRUN:
        cfg.name = f"{cfg.name}_{hydra.job.num}"
    main_rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0
    main_rank = main_rank and int(os.environ.get("LOCAL_RANK", "0")) == 0
    for job in jobs:
        own = OmegaConf.load(asset_dir("conf") / f"{job}.yaml")
        own.pop("defaults", None)
        with open_dict(cfg):
            step = OmegaConf.merge(own, cfg, {"job": job})  # a chained job finds the keys that only it has
        OmegaConf.set_struct(step, True)
        if job != "train" and not main_rank:
            continue  # only training is shared between ranks
        if main_rank and not cfg.quiet:
            _show(step, job)
        importlib.import_module(JOBS[job][0]).run(step)


def _run_hydra() -> None:
    """Compose and run; every failure becomes one line unless HYDRA_FULL_ERROR is set."""
    import hydra

    asked = os.environ.get("HYDRA_FULL_ERROR")
    failures: list[Exception] = []

    def task(cfg: DictConfig) -> None:
        _restore(asked)
        try:
            run_jobs(cfg)
        except Exception as error:
            if asked:
                raise
            failures.append(error)
        finally:
            os.environ["HYDRA_FULL_ERROR"] = "1"

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on instead of printing them its own way
    try:
        mount()
        hydra.main(version_base="1.3", config_path=str(asset_dir("conf")), config_name="train")(task)()
    except Exception as error:
        if asked:
            raise
        failures.append(error)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        _restore(asked)
    for error in failures:
        _complain(explain(error))
    if failures:
        sys.exit(1)


def explain(error: Exception) -> str:
    """One line for an error: longtrain's own as they are, Hydra's with what exists, others with their type."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, LongtrainError):
        return str(error)
    text = str(error)
    if isinstance(error, HydraException):
        if found := re.search(r"Could not find '(?:([^']*)/)?([^'/]+)'", text):
            group, option = found.groups()
            known = re.findall(r"^\t(\S+)$", text, re.M)
            return f"unknown {group or 'config'} '{option}'{_near(option, known)}; known: {', '.join(known)}"
        if found := re.search(r"Could not override '([^']+)'\.\s*No match in the defaults list", text):
            return f"'{found[1]}=' is not a group of this job; write +{found[1]}=NAME to add it"
        if found := re.search(r"Could not override '([^']+)'", text):
            return _unknown_key(found[1])
        if found := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
            return f"key '{found[1]}' exists already; write {found[1]}=VALUE without the +"
    line = " ".join(part.strip() for part in text.splitlines() if part.strip())
    if isinstance(error, HydraException | OmegaConfBaseException):
        return line
    return f"{type(error).__name__}: {line} (HYDRA_FULL_ERROR=1 shows where)"


def _unknown_key(key: str) -> str:
    """Which keys there are at the place of an unknown one; composes again without the key overrides."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig

    groups = [arg for arg in sys.argv[1:] if re.match(r"\+?[\w/]+=[\w-]+$", arg) and _is_group(arg)]
    job = next((arg.split("=")[1] for arg in sys.argv[1:] if arg.startswith("--config-name=")), "train")
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):
        node: Any = hydra.compose(job, overrides=groups)
    *parents, leaf = key.split(".")
    trail: list[str] = []
    for part in parents:
        if not isinstance(node, DictConfig) or part not in node or not isinstance(node[part], DictConfig):
            leaf = part
            break
        node, trail = node[part], [*trail, part]
    prefix = ".".join([*trail, ""])
    known = sorted(f"{prefix}{name}" for name in node)
    return f"unknown key '{key}'{_near(prefix + leaf, known)}; known{f' in {prefix[:-1]}' if prefix else ''}: {', '.join(known)}"


def _is_group(arg: str) -> bool:
    group = arg.lstrip("+").split("=")[0]
    return group in ("recipe", "method") or (asset_dir("conf") / group).is_dir()


def _is_value(arg: str) -> bool:
    """Whether an argument is the value of the flag before it (`--cfg job`)."""
    before = sys.argv[sys.argv.index(arg) - 1]
    flags = (
        "--cfg",
        "-c",
        "--package",
        "-p",
        "--config-dir",
        "-cd",
        "--config-path",
        "-cp",
        "--config-name",
        "-cn",
    )
    return before in (*flags, "--info", "-i", "--shell-completion", "-sc", "--experimental-rerun")


def _quoted(arg: str) -> str:
    """A free-text value in Hydra's quotes, so that commas, apostrophes and brackets may be typed as they are."""
    key, _, value = arg.partition("=")
    if key.lstrip("+") not in FREE_TEXT or (len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]):
        return arg
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped).replace("${", "\\${")
    return f"{key}='{escaped}'"


def _unknown_word(word: str) -> NoReturn:
    """Usage error: exit 2."""
    if word in JOBS:
        _complain(f"the job comes first: longtrain {word} ...")
    else:
        known = [*JOBS, "recipes"]
        hint = _near(word, known)
        if word in recipes():
            hint = f"; a recipe is chosen by +recipe={word}"
        _complain(f"unknown word '{word}'{hint}; jobs: {', '.join(known)}; everything else is KEY=VALUE")
    sys.exit(2)


def _near(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _show(cfg: DictConfig, job: str) -> None:
    """Print the resolved configuration to stderr, so that a job's own output can be piped."""
    from omegaconf import OmegaConf
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(stderr=True)
    console.rule(f"longtrain {job}: {cfg.name}")
    console.print(
        Syntax(OmegaConf.to_yaml(cfg, resolve=True), "yaml", theme="ansi_dark", background_color="default")
    )


def _restore(value: str | None) -> None:
    if value is None:
        os.environ.pop("HYDRA_FULL_ERROR", None)
    else:
        os.environ["HYDRA_FULL_ERROR"] = value


def _complain(line: str) -> None:
    print(f"longtrain: error: {line}", file=sys.stderr)


def _say(text: str) -> None:
    print(text, end="")
