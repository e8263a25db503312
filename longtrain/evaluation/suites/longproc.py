"""Suite `longproc`: LongProc's html_to_tsv, tables to extract from web pages, in three output lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from longtrain.data.read.files import HUB, PACKED_SUFFIXES, local_file
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.published import Published
from longtrain.evaluation.scoring.longproc import html_to_tsv
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.suites.shared import distinct, prompts_up_to, read_rows, settings_of
from longtrain.evaluation.task import Example, Task
from longtrain.settings import Count, Text, some_of, within

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

MAX_NEW_TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 9216}
"""Length group -> the maximum number of tokens of an answer."""

PUBLISHED = Published(
    "LongProc html_to_tsv",
    tasks={"html_to_tsv_0.5k": 100, "html_to_tsv_2k": 189, "html_to_tsv_8k": 120},
    sha256={"html_to_tsv_0.5k": "e5b24a7df041466270d163f377d0a02094946abead5685f41a1f109243ee39ff"},
    settings={"chat": True},
)
"""The hash covers examples with their filled prompts (princeton-pli/LongProc, commit 78e873ae)."""

if TYPE_CHECKING:
    Groups = tuple[str, ...]
else:
    Groups = some_of(MAX_NEW_TOKENS)

UNVERIFIED = "the examples of {} are not compared with the published ones, those of 0.5k are"

FIELDS = {"task_id": (str,), "gt": (str,)}
FILLED = ("html_path", "task_topic", "task_description", "tsv_header", "filtering_instruction")
GROUP = "output_length_group"
TEMPLATES = "prompts.yaml"


@dataclass(frozen=True)
class LongProcSettings:
    """The suite's own keys in conf/suite/longproc.yaml."""

    data: Text | None
    groups: Groups
    limit: Count | None
    max_prompt_tokens: Annotated[int, within(2)] | None
    chat: bool


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The length groups named by `suite.groups`, with the examples at `suite.data`.

    Raises:
        ConfigError: a wrong setting, or prompts or answers longer than the target's window.
        DataError: a missing file or field.
    """
    own = settings_of(LongProcSettings, settings)
    if own.data is None:
        raise ConfigError(
            "suite.data=null, and LongProc's examples come from there; pass suite.data=FOLDER, the folder "
            "data of github.com/princeton-pli/LongProc with web pages unpacked, or a file of examples with "
            "'prompt'"
        )
    alone = len(own.groups) == 1
    tasks = [
        Task(
            f"html_to_tsv_{group}",
            table_rows(own.data, group, alone=alone)[: own.limit],
            "{prompt}",
            MAX_NEW_TOKENS[group],
            "row_f1",
            lambda text, row: html_to_tsv(text, row.fields["gt"]),
            own.chat,
            expected=lambda row: [row.fields["gt"]],
        )
        for group in own.groups
    ]
    unverified = [group for group in own.groups if f"html_to_tsv_{group}" not in PUBLISHED.sha256]
    return Suite(
        "longproc",
        tuple(prompts_up_to(own.max_prompt_tokens, tasks, target)),
        title=PUBLISHED.title,
        departures=PUBLISHED.departures({task.name: task.rows for task in tasks}, vars(own), sampling),
        notes=[UNVERIFIED.format(" and ".join(unverified))] if unverified else [],
    )


def table_rows(where: str, group: str, *, alone: bool = True) -> tuple[Example, ...]:
    """Read the examples of a length group.

    Args:
        where: a folder with `html_to_tsv_GROUP.json` or `.jsonl` (plain, .xz or .gz; its name may begin with
            more, and it may lie in `html_to_tsv` below the folder, as in LongProc's own data), one such file,
            or `hub:ORG/NAME/FILE`. Examples have `task_id`, `gt` and `prompt`; those in LongProc's own files
            have
            no prompt: it is filled from `prompts.yaml` and the web page at `html_path`, both beside the file.
        group: `0.5k`, `2k` or `8k`.
        alone: True if no other group is read. One file for several groups must state for each example to
            which it belongs to (`output_length_group`).

    Raises:
        ConfigError: the path does not exist.
        DataError: the file has no such group, or a field is missing.
    """
    file = _file(where, group)
    rows = read_rows(str(file), PUBLISHED.title, FIELDS)
    if not alone and local_file(where).is_file() and any(GROUP not in row for row in rows):
        raise DataError(
            f"{file} has examples without the field '{GROUP}', so their output lengths are unknown; "
            "pass the one that all have, as in suite.groups=[2k], or a folder with a file of each"
        )
    of_group = [row for row in rows if str(row.get(GROUP, group)) == group]
    if not of_group:
        there = sorted({str(row[GROUP]) for row in rows})
        raise DataError(
            f"{file} has examples of the output length {', '.join(there)} and none of {group}; pass "
            f"suite.groups=[{','.join(there)}], or add examples of {group}"
        )
    found = []
    for id_, row in zip(distinct(row["task_id"] for row in of_group), of_group, strict=True):
        prompt = row["prompt"] if "prompt" in row else _filled(row, file)
        if not isinstance(prompt, str) or not prompt:
            raise DataError(f"{file}: the prompt of {row['task_id']} is {prompt!r:.40}; it must be a text")
        found.append(Example(id_, {"prompt": prompt, "gt": row["gt"]}))
    return tuple(found)


def _file(where: str, group: str) -> Path:
    path = local_file(where)
    if path.is_file():
        return path
    if not path.is_dir():
        kind = "the Hub" if where.startswith(HUB) else "there"
        raise ConfigError(
            f"{PUBLISHED.title} data at {where}: nothing {kind}; pass a folder with html_to_tsv_{group}.json "
            "or .jsonl (the data folder of github.com/princeton-pli/LongProc, its web pages unpacked), or a "
            "file"
        )
    names = [f"html_to_tsv_{group}.{kind}{pack}" for kind in ("json", "jsonl") for pack in PACKED_SUFFIXES]
    files = sorted(file for file in path.rglob("*html_to_tsv_*") if file.name.endswith(tuple(names)))
    if len(files) != 1:
        there = [known for known in MAX_NEW_TOKENS if any(path.rglob(f"*html_to_tsv_{known}.json*"))]
        found = ", ".join(str(file.relative_to(path)) for file in files) or "none"
        raise DataError(
            f"{path} must hold one html_to_tsv_{group}.json or .jsonl, it has {found}; pass "
            f"suite.groups=[{','.join(there)}], or a folder with one file of each"
        )
    return files[0]


def _filled(row: Mapping[str, Any], file: Path) -> str:
    """Fill the prompt of an example from LongProc's own files."""
    import yaml

    missing = [field for field in FILLED if not isinstance(row.get(field), str)]
    if missing:
        raise DataError(
            f"{file}: {row['task_id']} has neither 'prompt' nor a text '{missing[0]}'; an example has a "
            f"prompt, or {', '.join(FILLED)}"
        )
    template, page = file.parent / TEMPLATES, file.parent / row["html_path"]
    for needed in (template, page):
        if not needed.is_file():
            raise DataError(
                f"{file}: {row['task_id']} has no 'prompt', and {needed} to fill one is missing; unpack "
                "LongProc's data beside the file"
            )
    html = page.read_text(encoding="utf-8")
    try:
        text = yaml.safe_load(template.read_text(encoding="utf-8"))["USER_PROMPT"]
        return str(text.format(**{**row, "html_str": html, "reference_output": row["gt"]}))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, yaml.YAMLError) as error:
        raise DataError(
            f"{template} does not fill the prompt of {row['task_id']} ({type(error).__name__}: {error}); it "
            "must hold USER_PROMPT, a text with fields like {html_str} and {tsv_header}"
        ) from None
