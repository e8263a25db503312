"""What a judge is told: the published prompts, which ship as files, or a user's own, with their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from longtrain.assets import asset_dir
from longtrain.data.read.files import read_jsonl, read_text
from longtrain.errors import ConfigError, DataError

MT_BENCH_SHA256, LONGBENCH_WRITE_SHA256 = "867ed14f4605ca54", "4f59f263c333f3cf"
"""`JudgePrompts.sha256` of the published prompts."""


@dataclass(frozen=True)
class JudgePrompts:
    """The prompts of one benchmark's judge.

    Args:
        texts: name -> (system prompt, template); an empty system prompt is not sent.
        source: where they are from, for the result.
    """

    texts: Mapping[str, tuple[str, str]]
    source: str

    @property
    def sha256(self) -> str:
        """The first 16 digits of the hash of all texts."""
        content = json.dumps({name: list(pair) for name, pair in self.texts.items()}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def official(self) -> bool:
        """Whether these are the published texts."""
        return self.sha256 in (MT_BENCH_SHA256, LONGBENCH_WRITE_SHA256)

    def facts(self) -> dict[str, str | bool]:
        """What the result says about them."""
        return {"sha256": self.sha256, "official": self.official, "source": self.source}


def mt_bench_prompts(where: str | None = None) -> JudgePrompts:
    """The prompts of MT-Bench's single-answer grading.

    Args:
        where: a JSONL file as FastChat's judge_prompts.jsonl, rows of `name`, `system_prompt` and
            `prompt_template`; other names than the four are left out. None: the published ones.

    Raises:
        ConfigError: no such file.
        DataError: a prompt or one of its places is missing.
    """
    published = dict(_named(_file(None, "mt_bench.jsonl")))
    if where is None:
        return JudgePrompts(published, "lm-sys/FastChat, judge_prompts.jsonl")
    path = _file(where, "")
    texts = {name: pair for name, pair in _named(path) if name in published}
    for name, (_, template) in published.items():
        if name not in texts:
            raise DataError(f"{path} has no prompt {name}; it needs {', '.join(published)}")
        there, needed = _places(path, name, texts[name][1]), _places(path, name, template)
        if there != needed:
            raise DataError(
                f"{path}: prompt {name} has the places {', '.join(there) or 'none'}; it needs "
                f"{', '.join(needed)}"
            )
    return JudgePrompts(texts, path.name)


def longbench_write_prompts(where: str | None = None) -> JudgePrompts:
    """The prompt of LongBench-Write.

    Args:
        where: a text file that holds `$INST$` and `$RESPONSE$`; None: the published one.

    Raises:
        ConfigError: no such file.
        DataError: it lacks one of the two.
    """
    path = _file(where, "longbench_write.txt")
    text = read_text(path)
    for mark in ("$INST$", "$RESPONSE$"):
        if mark not in text:
            raise DataError(f"{path} lacks {mark}; the request goes where $INST$ is, the text at $RESPONSE$")
    return JudgePrompts(
        {"judge": ("", text)}, path.name if where else "THUDM/LongWriter, evaluation/judge.txt"
    )


def _named(path: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Name, system prompt and template of each row."""
    for place, row in read_jsonl(path):
        pair = row.get("system_prompt", ""), row.get("prompt_template", "")
        if not all(isinstance(text, str) for text in pair):
            raise DataError(f"{place}: 'system_prompt' and 'prompt_template' of a prompt must be texts")
        yield str(row.get("name")), pair


def _places(path: Path, name: str, template: str) -> list[str]:
    """The names that a template is filled at."""
    try:
        return sorted({field for _, field, _, _ in Formatter().parse(template) if field is not None})
    except ValueError as error:
        raise DataError(f"{path}: prompt {name}: {error}; a brace is written {{{{ or }}}}") from None


def _file(where: str | None, bundled: str) -> Path:
    path = asset_dir("bundled") / "judge" / bundled if where is None else Path(where).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"suite.judge.prompts={where} is no file; pass a file of prompts, or null for the published ones"
        )
    return path
