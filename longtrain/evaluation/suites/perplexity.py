"""Suite `perplexity`: sliding windows over corpora; each context is evicted before its next tokens are
scored.

Shapes: T tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation import corpora, perplexity
from longtrain.evaluation.corpora import prefix_of
from longtrain.evaluation.suite import ByTask, Scale, Suite, Summary
from longtrain.evaluation.suites.shared import settings_of
from longtrain.evaluation.task import Example, Measured, rows_sha256
from longtrain.settings import Count, Tokens, read, wrong
from longtrain.settings import Text as Word
from longtrain.systems import EVICTOR, SELECTOR

if TYPE_CHECKING:
    from longtrain.decoding.roles import Parts
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

JOINS = {"wikitext2": "\n\n", "c4": " "}
"""Corpus -> separator by which its texts are joined, as in published results; other corpora are
not joined.
"""
ROWS = {"c4": 1100}
"""Corpus -> number of texts used by published results; other corpora are used in full."""


@dataclass(frozen=True)
class PerplexitySettings:
    """The keys of the suite; see conf/suite/perplexity.yaml."""

    texts: tuple[Any, ...]
    window: Tokens
    stride: Tokens
    first_windows: bool = True
    max_tokens: Tokens | None = None
    limit: Count | None = None


@dataclass(frozen=True)
class Text:
    """An entry of `suite.texts`; its key `from` is the field `where`.

    Args:
        where: a place as in `corpora.texts`, or a folder of prepared data.
        join: the separator between texts that are joined into one; None: each text is separate.
        limit: the maximum number of texts; None: all.
        name: the task's name; None: that of the file or corpus.
    """

    where: Word
    join: str | None = None
    limit: Count | None = None
    name: str | None = None

    @property
    def task(self) -> str:
        """The name of the task."""
        here = Path(self.where).expanduser()
        return self.name or (here.name if here.exists() else self.where)


@dataclass(frozen=True)
class Windows(Measured):
    """The windows of a corpus.

    Args:
        name: the corpus's name.
        rows: examples, one per window: `text` (its number), `begin`, `first`, `end` (see
            `perplexity.TextWindow`), `bytes`.
        ids: token ids of each text.
        window: number of tokens of a window.
        stride: tokens scored in each window but a text's first.
        whole: True if every token of the corpus is scored.
    """

    name: str
    rows: tuple[Example, ...]
    ids: tuple[np.ndarray, ...] = field(repr=False)
    window: int
    stride: int
    whole: bool
    one_prefill = True

    def size(self, example: Example) -> int:
        """Number of tokens of the window's context."""
        return int(example.fields["first"] - example.fields["begin"])

    def settings(self) -> dict[str, Any]:
        """See `Measured`."""
        digest = hashlib.sha256()
        for ids_T in self.ids:
            digest.update(len(ids_T).to_bytes(8, "little") + ids_T.astype("<i8").tobytes())
        return {
            "task": self.name,
            "metric": "perplexity",
            "window": self.window,
            "stride": self.stride,
            "rows": len(self.rows),
            "rows_sha256": rows_sha256(self.rows),
            "tokens_sha256": digest.hexdigest(),
        }

    def measure(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[dict[str, float]]:
        """`nats`, `tokens` and `bytes` of the scored tokens; `context_tokens` and their `kept_entries`."""
        contexts, scored = [], []
        for example in examples:
            text, begin, first, end = (int(example.fields[key]) for key in ("text", "begin", "first", "end"))
            contexts.append(self.ids[text][begin:first].tolist())
            scored.append(self.ids[text][first:end].tolist())
        found = perplexity.measure(target, parts, contexts, scored=scored)
        return [
            {
                "nats": one.nats,
                "tokens": one.tokens,
                "bytes": int(example.fields["bytes"]),
                "context_tokens": self.size(example),
                "kept_entries": one.kept_entries,
            }
            for one, example in zip(found, examples, strict=True)
        ]


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """One task for each entry of `suite.texts`.

    Raises:
        ConfigError: a wrong setting, or a window beyond the target's context.
        DataError: a text cannot be read, or is too short.
    """
    asked = settings_of(PerplexitySettings, settings)
    target.require_tokenizer()
    window, stride, texts = asked.window, asked.stride, _entries(asked.texts)
    if not stride < window <= target.info.max_positions:
        raise ConfigError(
            f"suite.window={window}, suite.stride={stride}; allowed: stride < window <= "
            f"{target.info.max_positions} (the target's context)"
        )
    tasks = tuple(_windows(entry, target, asked) for entry in texts)
    cut = [task.name for task in tasks if not task.whole]
    notes = [f"windows of {window} tokens, {stride} scored in each after its context is evicted once"]
    if asked.first_windows:
        notes.append("a text's first window is scored whole; it has no context to evict")
    else:
        notes.append("the first window of each text is left out: every token has a full context")
    if cut:
        notes.append(f"the beginning only of {', '.join(cut)} (suite.max_tokens or suite.limit)")
    alone = [
        task.name
        for task, one in zip(tasks, texts, strict=True)
        if one.join is None and len(task.ids) > 1 and Path(one.where).expanduser().exists()
    ]
    if alone:
        notes.append(
            f"each text of {', '.join(alone)} is read alone; published results of WikiText-2 and C4 are of "
            "texts joined into one (`join` in suite.texts)"
        )
    notes += [f"the first {one.limit} texts of {one.task}" for one in texts if one.limit]

    def summarise(records: ByTask) -> Summary:
        tasks, extra = {}, {}
        for name, some in records.items():
            nats, tokens, size = (
                sum(float((record.measures or {})[key]) for record in some)
                for key in ("nats", "tokens", "bytes")
            )
            tasks[name] = round(perplexity.perplexity(nats, int(tokens)), 4)
            bits = nats / math.log(2) / size if size else None
            extra[name] = {
                "tokens": int(tokens),
                "bytes": int(size),
                "bits_per_byte": bits and round(bits, 4),
            }
        return Summary(tasks=tasks, extra={"texts": extra})

    return Suite(
        "perplexity",
        tasks,
        scale=Scale("perplexity", None, higher_is_better=False),
        summarise=summarise,
        title="Perplexity",
        notes=notes,
        needs=frozenset({EVICTOR, SELECTOR}),
    )


def _entries(items: Sequence[Any]) -> list[Text]:
    """Parse `suite.texts`: `wikitext2`, `PATH`, `{from: c4, join: " ", limit: 1100, name: C4}`."""
    found = [_entry(item) for item in items]
    if len({text.task for text in found}) < len(found) or not found:
        raise wrong("suite.texts", list(items), "one or more corpora or paths with different names")
    return found


def _entry(item: Any) -> Text:
    values = dict(item) if isinstance(item, Mapping) else {"from": item}
    where = values.pop("from", None)
    usual = {"where": where, "join": JOINS.get(str(where)), "limit": ROWS.get(str(where))}
    try:
        return read(Text, usual | values, "suite.texts")
    except ConfigError:
        allowed = "corpora, paths, and mappings such as {from: c4, join: ' ', limit: 1100, name: c4}"
        raise wrong("suite.texts", item, allowed) from None


def _windows(entry: Text, target: Target, asked: PerplexitySettings) -> Windows:
    """Make windows until `max_tokens` are read, or `limit` windows are made."""
    window, stride, limit = asked.window, asked.stride, asked.limit
    prefix = np.asarray(prefix_of(target.tokenizer), np.int64)
    rows: list[Example] = []
    ids: list[np.ndarray] = []
    seen: set[str] = set()
    left, whole = asked.max_tokens, True
    for text in _texts(entry, target):
        if left == 0 or (limit is not None and len(rows) >= limit):
            whole = False
            break
        whole &= left is None or len(text.ids_T) <= left
        kept = len(text.ids_T) if left is None else min(left, len(text.ids_T))
        left = None if left is None else left - kept
        new = text.name not in seen
        seen.add(text.name)
        ids.append(np.concatenate((prefix, text.ids_T[:kept])))
        bytes_T = np.concatenate((np.zeros(len(prefix), np.int64), text.bytes_T))
        for span in perplexity.spans(len(ids[-1]), window=window, stride=stride):
            if limit is not None and len(rows) >= limit:
                whole = False
                break
            if span.begin == 0 and not asked.first_windows:
                continue
            place = {"text": len(ids) - 1, "begin": span.begin, "first": span.first, "end": span.end}
            size = int(bytes_T[span.end] - bytes_T[span.first])
            name = f"{text.name}@{span.first}" if new else f"{text.name}#{len(ids)}@{span.first}"
            rows.append(Example(name, {"name": text.name, **place, "bytes": size}))
    if not rows:
        least = 2 if asked.first_windows else window + 1
        raise DataError(
            f"text {entry.task} at {entry.where} has no {least} tokens in one piece; give it more"
        )
    return Windows(entry.task, tuple(rows), tuple(ids), window, stride, whole)


def _texts(entry: Text, target: Target) -> Iterator[corpora.Tokens]:
    tokenizer = target.require_tokenizer()
    prepared = corpora.prepared_tokens(Path(entry.where).expanduser(), tokenizer)
    if prepared is not None:
        yield from prepared
        return
    named = corpora.texts(entry.where, limit=entry.limit)
    if entry.join is None:
        for name, text in named:
            yield corpora.tokenise(tokenizer, name, text)
    else:
        yield corpora.tokenise(tokenizer, entry.task, entry.join.join(text for _, text in named))
