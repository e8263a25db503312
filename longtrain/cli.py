"""The command line: the job word selects the primary config, Hydra composes it, and the job's `run` runs."""

from __future__ import annotations

import os
import select
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from longtrain import __version__
from longtrain.assets import asset_dir
from longtrain.jobs import JOBS, NAMED
from longtrain.prompt import interrupts
from longtrain.prompt.grammar import in_grammar, in_list, spelled_out
from longtrain.prompt.store import composed_once, mount
from longtrain.tables import printable

if TYPE_CHECKING:
    from omegaconf import DictConfig

TOP_HELP = """\
longtrain {version}: train, validate and ship the learned modules that make long-context LLM inference fast

Usage: longtrain [JOB] [+recipe=NAME] [GROUP=OPTION ...] [KEY=VALUE ...]     (or: python -m longtrain ...)

{jobs}
  recipes    list the recipes there are
  config     print a recipe's configuration, resolved: longtrain config [JOB] +recipe=NAME
  completion print what bash, zsh or fish evaluates for Tab: eval "$(longtrain completion bash)"

Without a job word the recipe's own jobs run; several: longtrain train,export,eval +recipe=NAME
  longtrain generate +recipe=quickstart prompt="Once upon a time"
longtrain JOB --help lists groups, options, suites and keys; HYDRA_FULL_ERROR=1 shows where an error arose.
"""

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
"""Flags that are accepted as a key: `--verify FOLDER` is `verify=FOLDER`."""

PLAIN_FLAGS = ("--help", "-h", "--hydra-help", "--multirun", "-m", "--run", "-r", "--resolve", "--version")
"""Flags of longtrain and of Hydra that take no value."""


def main() -> None:
    """Entry point of `longtrain` and `python -m longtrain`.

    Exit codes: 0, 1 (the job failed), 2 (bad command line), 130 (Ctrl-C) or 141 (the output pipe is closed).
    """
    try:
        try:
            with interrupts.at_once():
                _begin()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write(interrupts.NOTHING_DONE)
        sys.exit(130)
    except BrokenPipeError:  # `longtrain ... | head`
        _end_output()
        sys.exit(141)
    except OSError as error:  # `longtrain ... > FILE` on a disk that is full
        if not _is_full(error):
            raise
        _end_output()
        _complain(f"the output cannot be written: {error.strerror or error}")
        sys.exit(1)


def _is_full(error: BaseException) -> bool:
    """Return True if an error means that the disk of standard output is full."""
    from longtrain.files import FULL  # slow to import, which `--help` should not wait for

    return isinstance(error, OSError) and error.errno in FULL and error.filename is None


def _end_output() -> None:
    """Redirect the remaining output to the null device, because Python flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _begin() -> None:
    """Run the job, or print the help, that the first word names."""
    word, rest = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    if word in ("-h", "--help"):
        jobs = "\n".join(f"  {name:<11} {about}" for name, (_, about) in JOBS.items())
        _print(TOP_HELP.format(version=__version__, jobs=jobs))
    elif word in ("-V", "--version"):
        _print(f"longtrain {__version__}\n")
    elif word == "recipes":
        from longtrain.prompt.store import own_folder

        _print("".join(f"{name:<26} {about}\n" for name, about in recipes(own_folder(rest)).items()))
    elif word in ("completion", "-sc", "--shell-completion"):
        _complete(word, rest)
    elif word in JOBS and not {"-h", "--help"}.isdisjoint(rest):
        from longtrain.prompt.help import job_help

        _print(job_help(word, rest, columns=_columns()))
    else:
        quiet_threads()
        _run_hydra(_words(sys.argv[1:]))


def _words(typed: Sequence[str]) -> list[str]:
    """Return the words of a command in Hydra's form; exit with 2 at one that is no job, flag or override."""
    first, rest = typed[0], [*typed[1:]]
    ending = []
    if first == "config":
        ending = ["--cfg", "job", "--resolve"]
        first, rest = (rest[0], rest[1:]) if rest and rest[0] in JOBS else ("train", rest)
    bare = NAMED.get(first, ("", ""))[0]
    if first in JOBS:
        first = f"--config-name={first}"
    elif set(first.split(",")) <= set(JOBS):
        first = f"job={first}"
    return _ordered([first, *rest, *ending], bare)


def quiet_threads() -> None:
    """Let idle OpenMP threads sleep after a short spin, and limit their number to the cores of this process.

    Threads that spin for long slow down other processes on the same cores; threads that sleep at once slow
    down a training that has the cores to itself. Environment variables that the user has set are not changed.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    allowed = granted_cores(Path("/sys/fs/cgroup/cpu.max"))
    if allowed is not None and allowed < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(allowed))


def granted_cores(limit: Path) -> int | None:
    """Return the number of cores that the process's control group (container) allows; None: no limit."""
    try:
        quota, period = limit.read_text().split()[:2]
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def _columns() -> int | None:
    """Return the line width from COLUMNS or the terminal; None if the output is a pipe or a file."""
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return max(40, shutil.get_terminal_size().columns)
    return None


def _complete(word: str, rest: Sequence[str]) -> None:
    """Print Hydra's completion script for a shell, or the completions of the line that a shell passes."""
    from longtrain.errors import ConfigError
    from longtrain.prompt import completion

    if word != "completion":
        typed = completion.typed_words()
        _print("".join(f"{one} " for one in completion.first_words(typed)))
        _run_hydra(completion.without_job(typed, [word, *rest]), named=typed)
        return
    try:
        _run_hydra(completion.install(rest))
    except ConfigError as error:
        _complain(str(error))
        sys.exit(2)


def recipes(own: Path | None = None) -> dict[str, str]:
    """Return the recipes: name -> first line of its header comment.

    Args:
        own: the user's config folder (`--config-dir`), whose subfolder `recipe` holds further recipes.
    """
    files = sorted(asset_dir("recipes").glob("*.yaml"))
    files += sorted((own / "recipe").glob("*.yaml")) if own else []
    return {
        file.stem: _about(file.read_text(encoding="utf-8-sig")) for file in files
    }  # some editors write a byte order mark


def _about(text: str) -> str:
    """Return the first line of a file's header comment, skipping Hydra's `# @package`."""
    lines = [line for line in text.splitlines() if "@package" not in line] or [""]
    return lines[0].lstrip("# ") if lines[0].startswith("#") else ""


def _run_hydra(words: list[str], *, named: Sequence[str] | None = None) -> None:
    """Compose the configuration and run the job; a failure prints one line unless HYDRA_FULL_ERROR is set.

    Args:
        words: the command line in Hydra's form. `sys.argv` keeps the typed command, since records quote it
            and child processes receive it.
        named: the words that name recipes and methods, if they are not among `words`.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from longtrain.prompt import chain, naming
    from longtrain.prompt.explain import explain

    full, typed = os.environ.get("HYDRA_FULL_ERROR"), sys.argv
    failures: list[BaseException] = []
    runs: list[naming.SweptRun] = []

    def task(cfg: DictConfig) -> None:
        _set_full_error(full)
        sys.argv = typed
        before = len(failures)
        try:
            chain.run(cfg, words)
        except Exception as error:
            if full:
                raise
            failures.append(error)
        finally:
            _set_full_error("1")
            hydra_config = HydraConfig.get()
            if hydra_config.mode == RunMode.MULTIRUN:
                values = naming.swept(words, chain.plain_words(hydra_config.overrides.task))
                failed = len(failures) > before
                runs.append(naming.SweptRun(str(cfg.name), values, Path(cfg.run_dir), failed))

    _set_full_error("1")  # makes Hydra raise errors instead of printing them itself
    try:
        mount(words if named is None else named)
        sys.argv = [typed[0], *words]
        with composed_once(words):
            hydra.main(version_base="1.3", config_path=str(asset_dir("conf")), config_name="train")(task)()
    except Exception as error:
        if full:
            raise
        failures.append(error)
    finally:
        sys.argv = typed
        _set_full_error(full)
    for failure in failures:
        if isinstance(failure, BrokenPipeError) and _unread():
            raise failure
    if runs:
        naming.summarise(runs)
    for failure in failures:
        if _is_full(failure):
            _end_output()
        for fault in getattr(failure, "faults", (failure,)):
            _complain(explain(fault, words))
    if failures:
        sys.exit(1)


def _unread() -> bool:
    """Return True if the reader of the output pipe has closed it (checked without writing)."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a stream without a file descriptor
            poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _ordered(words: list[str], bare: str = "") -> list[str]:
    """Move flags and their values before the overrides, as argparse needs; exit with 2 at any other word.

    Args:
        words: the words as typed.
        bare: the key whose list takes all other words; empty: other words are errors.
    """
    flags, overrides, named = [], [], []
    first = words[0].removeprefix("--config-name=").removeprefix("job=") if words else ""
    sweeps = not {"-m", "--multirun"}.isdisjoint(words)
    for before, word in zip(["", *words], words, strict=False):
        if before in KEY_FLAGS:
            overrides.append(in_grammar(f"{before.lstrip('-')}={word}"))
        elif word in KEY_FLAGS:
            if word == words[-1]:
                _unknown_word(word, first)
        elif word[:1] == "-" or before in VALUE_FLAGS:
            if before not in VALUE_FLAGS and word.partition("=")[0] not in (*VALUE_FLAGS, *PLAIN_FLAGS):
                _unknown_flag(word)
            flags.append(word)
        elif word[:1] in ("+", "~") or "=" in word:
            overrides += [in_grammar(one, sweeps=sweeps) for one in spelled_out(word)]
        elif bare:
            named.append(word)
        else:
            _unknown_word(word, first)
    return [*flags, *overrides, *([f"{bare}={in_list(named)}"] if named else [])]


def _unknown_flag(word: str) -> NoReturn:
    from longtrain.prompt.explain import near

    known = ["--help", "--version", "--multirun", "--config-dir", *KEY_FLAGS]
    said = f"unknown flag '{word}'{near(word, known)}; known: {', '.join(known)}"
    _complain(f"{said}; everything else is KEY=VALUE")
    sys.exit(2)


def _unknown_word(word: str, first: str) -> NoReturn:
    """Exit with 2 and say how to correct a word that is neither a job in first place nor KEY=VALUE."""
    from longtrain.prompt.explain import near

    known = [*JOBS, "recipes", "config", "completion"]
    if word in JOBS and set(first.split(",")) <= set(JOBS):
        _complain(f"several jobs are one word, with commas between: longtrain {first},{word} ...")
    elif word in known:
        _complain(f"the job comes first: longtrain {word} ...")
    elif word in recipes():
        _complain(f"'{word}' is a recipe; write +recipe={word}")
    else:
        jobs = ", ".join(known)
        _complain(f"unknown word '{word}'{near(word, known)}; jobs: {jobs}; everything else is KEY=VALUE")
    sys.exit(2)


def _set_full_error(value: str | None) -> None:
    os.environ.pop("HYDRA_FULL_ERROR", None)
    if value is not None:
        os.environ["HYDRA_FULL_ERROR"] = value


def _complain(line: str) -> None:
    print(f"longtrain: error: {printable(line)}", file=sys.stderr)


def _print(text: str) -> None:
    print(text, end="")
