"""The output of `longtrain JOB --help`: groups, options and every key with its comment from the YAML files.

The files are read as text to keep their comments; neither Hydra nor torch is imported.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from longtrain import methods
from longtrain.assets import asset_dir
from longtrain.jobs import JOBS, NAMED
from longtrain.prompt.job_groups import EXAMPLES, GROUPS
from longtrain.prompt.suite_help import suites_help

HIDDEN = ("hydra",)
"""Folders of `conf` that are not groups of ours."""
END = """\
The whole configuration, resolved:  longtrain config {job} +recipe=NAME
Check everything and do nothing:    longtrain {job} +recipe=NAME dry_run=true
"""


def job_help(job: str, words: Sequence[str] = (), *, columns: int | None = None) -> str:
    """The help of a job: an example, its groups and their options, suites, and all keys.

    Args:
        job: a word of `JOBS`.
        words: words of the command line; `+recipe=NAME` and `GROUP=OPTION` select options.
        columns: maximum line width; None: lines are not wrapped.
    """
    options = groups()
    mine = [group for group in GROUPS[job] if group != "suite"]
    usage = f"longtrain {job} {NAMED[job][1]}" if job in NAMED else f"longtrain {job}"
    takes = " [+recipe=NAME] [GROUP=OPTION ...]" if mine else ""
    lines = [f"{JOBS[job][1]}\n\nUsage: {usage}{takes} [KEY=VALUE ...]\n"]
    if job in EXAMPLES:
        lines.append(f"  {EXAMPLES[job]}\n")
    if mine:
        listed = "".join(f"{group}: {', '.join(options[group])}\n" for group in mine)
        lines.append(f"== Groups and their options (GROUP=OPTION; recipes: longtrain recipes) ==\n{listed}")
    if suites := suites_help(job, words):
        lines.append(suites)
    lines.append(f"== Keys ==\n{_indented(job_keys(job))}")
    taken = choices(job, words)
    for group, option in taken.items():
        if group not in mine or option not in options[group]:
            continue
        if keys := group_keys(group, option):
            lines.append(f"== {group}={option} ({group}.KEY=VALUE) ==\n{_indented(keys)}")
    if (recipe := taken.get("recipe")) in options["recipe"]:
        lines.append(f"== Set by +recipe={recipe} ==\n{_indented(_recipe_text(str(recipe)))}")
    text = "\n".join([*lines, *([END.format(job=job)] if mine else [])])
    return text if columns is None else "".join(f"{broken(line, columns)}\n" for line in text.splitlines())


def broken(line: str, columns: int) -> str:
    """Wrap a line to `columns` characters with continuation lines indented; a comment continues
    as a comment.
    """
    if len(line) <= columns:
        return line
    inside = " " * (len(line) - len(line.lstrip()) + 4)
    key, mark, comment = line.partition("  # ")
    if not mark or len(key) > columns:
        return textwrap.fill(line, columns, subsequent_indent=inside, break_on_hyphens=False)
    own = f"{inside}# "
    rest = textwrap.wrap(comment, columns, initial_indent=own, subsequent_indent=own, break_on_hyphens=False)
    return "\n".join([key.rstrip(), *rest])


def groups() -> dict[str, list[str]]:
    """Each group with the names of its options, including recipes and methods."""
    folders = {path.name: path for path in asset_dir("conf").iterdir() if path.is_dir()}
    found = {name: sorted(file.stem for file in path.glob("*.yaml")) for name, path in folders.items()}
    found["recipe"] = sorted(file.stem for file in asset_dir("recipes").glob("*.yaml"))
    found["method"] = list(methods.names())
    return {name: found[name] for name in sorted(found) if name not in HIDDEN}


def choices(job: str, words: Sequence[str] = ()) -> dict[str, str]:
    """Group -> the selected option: by the job, overridden by the recipe, overridden by the words."""
    found: dict[str, str] = {}
    for file in (asset_dir("conf") / "base.yaml", asset_dir("conf") / f"{job}.yaml"):
        found |= _chosen_in(file.read_text(encoding="utf-8"))
    typed = dict(re.findall(r"(?m)^\+{0,2}(\w+)=(\w+)$", "\n".join(words)))
    if (recipe := typed.get("recipe", "")) in groups()["recipe"]:
        for text in _recipe_texts(recipe):
            found |= _chosen_in(text)
    known = groups()
    found |= {key: value for key, value in typed.items() if key in known}
    return {group: option for group, option in found.items() if group in known}


def job_keys(job: str) -> list[str]:
    """The lines of a job's own keys, then of the keys that all jobs share."""
    file = asset_dir("conf") / f"{job}.yaml"
    blocks = _blocks(file)
    own = re.findall(r"(?m)^(\w+):", file.read_text(encoding="utf-8"))
    names = [name for name in dict.fromkeys([*own, *blocks]) if name in blocks and name != "hydra"]
    return [line for name in names for line in blocks[name] if name != "job" or job == "train"]


def group_keys(group: str, option: str) -> list[str]:
    """The lines of an option's keys with their comments, after those of the options it builds on."""
    if group == "method":
        return _method_keys(option)
    return [
        line
        for lines in _blocks(asset_dir("conf") / group / f"{option}.yaml").values()
        for line in lines
        if line.strip() not in ("{}", "[]")
    ]


def _chosen_in(text: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^  - (?:override )?/?(\w+): (\w+)", text))


def _recipe_texts(name: str) -> list[str]:
    """The texts of the files that a recipe builds on, then of the recipe itself."""
    text = (asset_dir("recipes") / f"{name}.yaml").read_text(encoding="utf-8")
    found = [one for base in bases_of(text) for one in _recipe_texts(base)]
    return [*found, text]


def bases_of(text: str) -> list[str]:
    """The other files of its folder that a configuration builds on."""
    listed = re.findall(r"(?m)^defaults: \[(\w+)\]", text)
    block = re.search(r"(?m)^defaults:\n((?:[ \t]+.*\n)+)", text)
    listed += re.findall(r"(?m)^\s+- (\w+)\s*(?:#.*)?$", block[1] if block else "")
    return [name for name in listed if name != "_self_"]


def _recipe_text(name: str) -> list[str]:
    text = (asset_dir("recipes") / f"{name}.yaml").read_text(encoding="utf-8")
    return re.sub(r"(?m)^# @package.*\n", "", text).splitlines()


def _blocks(file: Path) -> dict[str, list[str]]:
    """Top-level key -> its lines with comments; keys of the file's bases first."""
    text = file.read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    for base in bases_of(text):
        if (beside := file.with_name(f"{base}.yaml")).is_file():
            found |= _blocks(beside)
    lines: list[str] | None = None
    for line in text.splitlines():
        if match := re.match(r"(\w+):", line):
            lines = found[match[1]] = [line]
        elif lines is not None and line.strip():
            lines.append(line)
    found.pop("defaults", None)
    return found


def method_settings(name: str) -> list[tuple[str, str, str]]:
    """Every field of a method's `Config` and its nested classes: key, default as typed, and comment."""
    found: dict[str, tuple[str, str, str]] = {}
    for kind in reversed(methods.config_class(name).__mro__[:-1]):
        source = Path(inspect.getfile(kind)).read_text(encoding="utf-8")
        found |= {setting[0]: setting for setting in _fields(source, kind.__name__)}
    return list(found.values())


def _method_keys(name: str) -> list[str]:
    """The method's settings as lines of YAML."""
    return [
        f"{key}: {default}{f'  # {comment}' if comment else ''}"
        for key, default, comment in method_settings(name)
    ]


def _fields(source: str, name: str) -> Iterator[tuple[str, str, str]]:
    """The fields of a dataclass in a source file: key, default, comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT
    }
    tree = ast.parse(source)
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    ends = [node.lineno for node in config.body[1:]] + [(config.end_lineno or 0) + 1]
    for node, end in zip(config.body, ends, strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment = " ".join(comments[number] for number in range(node.lineno, end) if number in comments)
            yield node.target.id, _shown(node.value), comment


def _shown(node: ast.expr | None) -> str:
    """A default as it would be typed."""
    if isinstance(node, ast.Call):  # field(default_factory=...)
        made = next((word.value for word in node.keywords if word.arg == "default_factory"), None)
        if isinstance(made, ast.Lambda):
            return _shown(made.body)
        return "[]" if isinstance(made, ast.Name) and made.id == "list" else "{}"
    try:
        value: Any = ast.literal_eval(node) if node is not None else None
    except ValueError:
        return ast.unparse(node).lower() if node is not None else ""  # the constant FULL is typed as `full`
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value) if value != "" else '""'


def _indented(lines: Sequence[str]) -> str:
    return "".join(f"  {line}\n" for line in lines)
