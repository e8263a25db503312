"""Turns every error of the command line into one line: the problem, and the alternatives."""

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
"""Group -> how to name an option of the user's own."""
PLACES = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENAMETOOLONG,
}
"""Error numbers for paths that cannot be read or written."""


SHOWN = 200
"""Characters shown of the beginning and of the end of a long text."""


def explain(error: BaseException, words: Sequence[str] = ()) -> str:
    """The message for an error: our own unchanged, Hydra's with the existing options, others with their type.

    Args:
        error: the exception that ended the command.
        words: words of the command line in the form Hydra reads.
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
        advice = "shorten the packed sequences or prompts, or lower the batch"
        return f"{said}; {advice} (HYDRA_FULL_ERROR=1 shows where)"
    return f"{_in_words(error, line)} (HYDRA_FULL_ERROR=1 shows where)"


def _in_words(error: BaseException, line: str) -> str:
    """A sentence for an error of Python or a library that has no message of our own."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{_short(error.filename or line)}: no file can have so long a name; pass a shorter one"
    if isinstance(error, OSError) and error.filename is not None and error.errno in PLACES:
        return f"{error.filename}: {error.strerror}; outputs go below home=FOLDER or LONGTRAIN_HOME"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{_short(error.filename)} cannot be read or written: {error.strerror}"
    if isinstance(error, OSError) and error.errno in FULL:
        return f"the output cannot be written: {error.strerror}"
    if isinstance(error, MemoryError):
        return "this machine has not enough memory for it; lower what is large (sequences, prompts, batches)"
    if isinstance(error, RecursionError):
        return "a file is nested too deeply to be read, or a template calls itself without an end"
    if isinstance(error, UnicodeDecodeError):
        return f"a file is no UTF-8 text ({line}); write it as UTF-8"
    if line.startswith("Unexpected type for root: NoneType"):
        return (
            "a key was typed below one that is null; type the key above both, "
            "method.members={dspark:{n_layers:2}} for method.members.dspark.n_layers=2"
        )
    return f"{type(error).__name__}: {_short(line)}"


def _short(text: Any) -> str:
    """Shorten a long text by omitting its middle."""
    shown = str(text)
    return shown if len(shown) <= 2 * SHOWN else f"{shown[:SHOWN]}...{shown[-SHOWN:]}"


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the shortest known word with this prefix, else the closest one, or an empty
    string.
    """
    known = list(known)
    begun = sorted((one for one in known if len(word) > 2 and one.startswith(word)), key=len)
    close = begun or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _explain_override(text: str, words: Sequence[str]) -> str:
    """A message for commonly mistyped overrides; empty for any other Hydra error."""
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
    """List the keys that exist next to an unknown key, after composing the configuration from group choices
    only.

    Args:
        key: the unknown key.
        args: words of the command line in the form Hydra reads.

    Returns:
        The message; empty if the chosen groups do not compose.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig, ListConfig

    groups = [arg for arg in args if is_group(arg.split("=")[0].lstrip("+")) and "=" in arg]
    groups += [arg for arg in args if arg.startswith("job=")]
    job = next((arg.split("=")[1] for arg in args if arg.startswith("--config-name=")), "train")
    folder = own_folder(args)
    places = [f"hydra.searchpath={in_list([f'file://{folder.absolute()}'])}"] if folder else []
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):
            node: Any = hydra.compose(job, overrides=[*groups, *places])
    except Exception:  # the error is in a file, not in the typed words
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
    if rest and part in node and isinstance(node[part], ListConfig):
        return f"no item of {trail}{part} has '{key}' yet; write '++{key}=VALUE' if there is such a key"
    known = sorted(f"{trail}{name}" for name in node)
    if trail and not known:
        where, name = trail[:-1], ".".join([part, *rest])
        return f"{where} has no keys yet; write '+{key}=VALUE' or '{where}={{{name}: VALUE}}'"
    where = f" in {trail[:-1]}" if trail else ""
    groups = [name for name in node if trail or name != "suite" or job in SUITE_JOBS]
    below = [f"{trail}{name}.{part}" for name in groups if not rest and _holds(node, name, part)]
    hint = f"; did you mean {' or '.join(below)}?" if below else near(trail + part, known)
    return f"unknown key '{key}'{hint}; known{where}: {', '.join(known)}"


def _holds(node: Any, name: str, key: str) -> bool:
    """True if the node has a mapping under `name` that contains `key`."""
    from omegaconf import DictConfig

    value = node._get_node(name)  # the raw node: interpolations may not resolve here
    return isinstance(value, DictConfig) and key in value


def _is_own_key(key: str, job: str) -> bool:
    """True if only this job has the key."""
    from omegaconf import OmegaConf

    file = asset_dir("conf") / f"{job}.yaml"
    return file.exists() and key.split(".")[0] in OmegaConf.load(file)


def is_group(key: str) -> bool:
    """True if a word before `=` is a group's name."""
    return key in ("recipe", "method") or (bool(key) and (asset_dir("conf") / key).is_dir())
