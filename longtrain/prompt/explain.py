"""One line for every error the command line can meet: what is wrong, and what there is instead."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Sequence
from typing import Any

from longtrain.assets import asset_dir
from longtrain.errors import LongtrainError
from longtrain.files import FULL
from longtrain.prompt.grammar import in_list
from longtrain.prompt.store import own_folder
from longtrain.prompt.suite_help import JOBS as SUITE_JOBS

OWN = {
    "recipe": "; your own: --config-dir FOLDER +recipe=NAME, from FOLDER/recipe/NAME.yaml",
    "target": "; your own: target.path=FOLDER, or a Hub id target.path=ORG/NAME",
}
"""Group -> how an option of the user's own is named."""
PLACES = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENAMETOOLONG,
}
"""Errors of a place that cannot be written to or read."""


SHOWN = 200
"""Characters of a long text's beginning and end that are shown."""


def explain(error: BaseException, words: Sequence[str] = ()) -> str:
    """What to print: our own errors as they are, Hydra's with what exists, others with their type.

    Args:
        error: what ended the command.
        words: of the command line, as Hydra reads them.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    text = str(error)
    if isinstance(error, LongtrainError):
        return text
    if isinstance(error, HydraException) and (line := _explain_override(text, words)):
        return line
    if isinstance(error.__cause__, OmegaConfBaseException):
        text = f"{text}: {error.__cause__}"
    line = " ".join(part.strip() for part in text.splitlines() if part.strip())
    if isinstance(error, HydraException | OmegaConfBaseException):
        return line
    if type(error).__name__ == "OutOfMemoryError":
        said = ". ".join(line.split(". ")[:2])
        return f"{said}; shorten the rows or prompts, or lower the batch (HYDRA_FULL_ERROR=1 shows where)"
    return f"{_in_words(error, line)} (HYDRA_FULL_ERROR=1 shows where)"


def _in_words(error: BaseException, line: str) -> str:
    """A sentence on an error of Python's or of a library, which nobody nearer to it has put into words."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{_short(error.filename or line)}: no file can have so long a name; pass a shorter one"
    if isinstance(error, OSError) and error.filename is not None and error.errno in PLACES:
        return f"{error.filename}: {error.strerror}; outputs go below home=FOLDER or LONGTRAIN_HOME"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{_short(error.filename)} cannot be read or written: {error.strerror}"
    if isinstance(error, OSError) and error.errno in FULL:
        return f"the output cannot be written: {error.strerror}"
    if isinstance(error, MemoryError):
        return "this machine has not enough memory for it; lower what is large (rows, prompts, batches)"
    if isinstance(error, RecursionError):
        return "a file is nested too deeply to be read, or a template calls itself without an end"
    if isinstance(error, UnicodeDecodeError):
        return f"a file is no UTF-8 text ({line}); write it as UTF-8"
    return f"{type(error).__name__}: {_short(line)}"


def _short(text: Any) -> str:
    """A text with its middle left out where it is long."""
    said = str(text)
    return said if len(said) <= 2 * SHOWN else f"{said[:SHOWN]}...{said[-SHOWN:]}"


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the shortest known word that begins so, else the closest one, or nothing."""
    known = list(known)
    begun = sorted((one for one in known if len(word) > 2 and one.startswith(word)), key=len)
    close = begun or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _explain_override(text: str, words: Sequence[str]) -> str:
    """A message for the overrides people mistype; empty for any other error of Hydra's."""
    if found := re.search(r"Could not find '(?:([^']*)/)?([^'/]+)'", text):
        group, option = found.groups()
        known = re.findall(r"^\t(\S+)$", text, re.M)
        return (
            f"unknown {group or 'config'} '{option}'{near(option, known)}; known: {', '.join(known)}"
            f"{OWN.get(group, '')}"
        )
    if found := re.search(r"Could not override '([^']+)'\.\s*No match in the defaults list", text):
        key = found[1]
        if is_group(key):
            return f"'{key}=' chooses nothing in this job; write +{key}=NAME"
        return explain_key(key, words)
    if found := re.search(r"(?:Could not override|Key) '([^']+)'", text):
        return explain_key(found[1], words)
    if found := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"key '{found[1]}' exists already; write {found[1]}=VALUE without the +"
    return ""


def explain_key(key: str, args: Sequence[str]) -> str:
    """Which keys there are at the place of an unknown one; composes again with the group choices alone.

    Args:
        key: that is not there.
        args: the words of the command line, as Hydra reads them.

    Returns:
        The message; empty where the groups that are chosen do not compose.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig

    groups = [arg for arg in args if is_group(arg.split("=")[0].lstrip("+")) and "=" in arg]
    groups += [arg for arg in args if arg.startswith("job=")]
    job = next((arg.split("=")[1] for arg in args if arg.startswith("--config-name=")), "train")
    folder = own_folder(args)
    places = [f"hydra.searchpath={in_list([f'file://{folder.absolute()}'])}"] if folder else []
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):
            node: Any = hydra.compose(job, overrides=[*groups, *places])
    except Exception:  # what is wrong is in a file, not in the words
        return ""
    worded = any(arg.startswith("--config-name=") for arg in args)
    if not worded and isinstance(node.job, str) and _is_own_key(key, node.job):
        words = " ".join([node.job, *(group for group in groups if "recipe=" in group)])
        return f"key '{key}' needs the job's word; write longtrain {words} {key}=VALUE"
    listed = [] if worded or isinstance(node.job, str) else node.job
    if having := [str(one) for one in listed if _is_own_key(key, str(one))]:
        return f"key '{key}' is one of {' and '.join(having)} alone; in a list of jobs write +{key}=VALUE"
    trail = ""
    part, *rest = key.split(".")
    while rest and part in node and isinstance(node[part], DictConfig):
        node, trail = node[part], f"{trail}{part}."
        part, *rest = rest
    known = sorted(f"{trail}{name}" for name in node)
    where = f" in {trail[:-1]}" if trail else ""
    groups = [name for name in node if trail or name != "suite" or job in SUITE_JOBS]
    below = [f"{trail}{name}.{part}" for name in groups if not rest and _holds(node, name, part)]
    hint = f"; did you mean {' or '.join(below)}?" if below else near(trail + part, known)
    return f"unknown key '{key}'{hint}; known{where}: {', '.join(known)}"


def _holds(node: Any, name: str, key: str) -> bool:
    """Whether what a configuration has under a name is a mapping with that key."""
    from omegaconf import DictConfig

    value = node._get_node(name)  # as it stands: interpolations may lead nowhere here
    return isinstance(value, DictConfig) and key in value


def _is_own_key(key: str, job: str) -> bool:
    """Whether a key is of this job alone: the other jobs' configurations lack it."""
    from omegaconf import OmegaConf

    file = asset_dir("conf") / f"{job}.yaml"
    return file.exists() and key.split(".")[0] in OmegaConf.load(file)


def is_group(key: str) -> bool:
    """Whether a word before `=` chooses an option of a group."""
    return key in ("recipe", "method") or (bool(key) and (asset_dir("conf") / key).is_dir())
