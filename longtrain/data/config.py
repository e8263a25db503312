"""What `conf/data/*.yaml` says, checked: sources, how documents are treated, and the stages of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from longtrain.errors import ConfigError

READERS = ("text", "jsonl", "conversations", "tokenised", "manifest", "synthetic")
FREE_KEYS = (
    "text",
    "jsonl",
    "conversations",
    "books",
    "code",
    "instruct",
    "questions",
    "prompts",
    "held_out",
)
"""Keys a data config may hold only so that its sources refer to them and the command line can set them."""


@dataclass(frozen=True)
class SourceConfig:
    """One source of documents.

    Args:
        reader: one of `READERS`.
        where: a file or folder, a manifest's name, or a synthetic task's name; `bundled:NAME` is text that
            ships with the package.
        kind: text kind (book, code, chat, ...); empty: what the adapter or manifest says.
        adapter: row adapter for `jsonl` and `conversations`; empty: the reader's default.
        columns: column map of the adapter, e.g. `{text: content}`.
        rows: most rows to take, in order; None: all.
        weight: passes over this source in an epoch; 0.5 is a random half of its documents.
        split: `train`, `val`, or `auto` (by `val_fraction`).
        optional: skip the source, instead of stopping, when its path is not set.
        options: further keys, handed to a synthetic task.
        held_out: files whose names begin so are not read.
        answers: `source` or `target`, over the config's `answers`; empty: the config's.
        prompts: prompts cut from each document of running text, where the config has `prompt_tokens`; 0:
            none, the text is there for synthetic sources to write into.
    """

    reader: str
    where: str | None
    kind: str = ""
    adapter: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    rows: int | None = None
    weight: float = 1.0
    split: str = "auto"
    optional: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    held_out: tuple[str, ...] = ()
    answers: str = ""
    prompts: int = 1

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> SourceConfig:
        """From one item of `data.sources`.

        Raises:
            ConfigError: no reader or more than one, an unknown key, or a value out of range.
        """
        readers = [key for key in READERS if key in values]
        if len(readers) != 1:
            raise ConfigError(
                f"data source {dict(values)} names {len(readers)} readers; give one of {READERS}"
            )
        rest = {key: value for key, value in values.items() if key not in readers}
        known = {f.name for f in fields(cls)} - {"reader", "where"}
        unknown = sorted(set(rest) - known)
        if unknown:
            raise ConfigError(
                f"unknown key {unknown[0]!r} in data source {readers[0]}; known: {sorted(known)}"
            )
        source = cls(
            reader=readers[0], where=values[readers[0]], **{k: v for k, v in rest.items() if v is not None}
        )
        if isinstance(source.held_out, str) or not all(isinstance(name, str) for name in source.held_out):
            raise ConfigError(
                f"data source {source.where}: held_out={source.held_out}; allowed: a list of names"
            )
        source = replace(source, held_out=tuple(source.held_out))
        _choice("data.sources.split", source.split, ("auto", "train", "val"))
        _choice("data.sources.answers", source.answers, ("", "source", "target"))
        if source.prompts < 0:
            raise ConfigError(f"data source {source.where}: prompts={source.prompts}; allowed: 0 or more")
        if source.weight <= 0:
            raise ConfigError(f"data source {source.where}: weight={source.weight}; allowed: above 0")
        if source.rows is not None and source.rows < 1:
            raise ConfigError(
                f"data source {source.where}: rows={source.rows}; allowed: 1 or more, or null for all"
            )
        return source


@dataclass(frozen=True)
class Stage:
    """A stretch of the run with one way of packing; one of `steps`, `fraction`, `epochs` says how long.

    Args:
        row_tokens: length of a packed row (one micro-batch).
        doc_tokens: longest piece of a document in it.
        steps: optimizer steps.
        fraction: share of the run's total steps.
        epochs: passes over the data; the last, incomplete optimizer step is left out.
    """

    row_tokens: int
    doc_tokens: int
    steps: int | None = None
    fraction: float | None = None
    epochs: float | None = None

    @classmethod
    def parse(cls, values: Any) -> Stage:
        """From one item of `data.stages`.

        Raises:
            ConfigError: an unknown or missing key, or a value that is no number or out of range.
        """
        known = [f.name for f in fields(cls)]
        if not isinstance(values, Mapping):
            raise ConfigError(f"data.stages item {values} is no mapping; known keys: {', '.join(known)}")
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ConfigError(f"unknown key {unknown[0]!r} in data.stages; known: {', '.join(known)}")
        for key in known:
            value, needed = values.get(key), key in ("row_tokens", "doc_tokens")
            whole = key not in ("fraction", "epochs")
            good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not (good or (value is None and not needed)):
                what = "a whole number" if whole else "a number"
                raise ConfigError(f"data.stages {key}={'null' if value is None else value}; allowed: {what}")
        return cls(**values)

    def __post_init__(self) -> None:
        if self.doc_tokens < 2 or self.row_tokens < self.doc_tokens:
            raise ConfigError(
                f"stage row_tokens={self.row_tokens} doc_tokens={self.doc_tokens}; "
                f"allowed: 2 <= doc_tokens <= row_tokens"
            )
        lengths = [value for value in (self.steps, self.fraction, self.epochs) if value is not None]
        if len(lengths) != 1 or lengths[0] <= 0:
            raise ConfigError(
                f"stage steps={self.steps} fraction={self.fraction} epochs={self.epochs}; "
                f"give exactly one, above 0"
            )


@dataclass(frozen=True)
class DataConfig:
    """A prepared mixture.

    Args:
        name: folder under `${home}/data`.
        sources: where documents come from.
        max_doc_tokens: longest document; None: the target's context.
        min_doc_tokens: shorter documents, and shorter tails of split ones, are left out.
        long_documents: what to do with a document above the limit: `error`, `truncate`, or `split` (kept
            whole; stages cut it into pieces).
        val_fraction: share of documents held out, chosen by a hash of their names.
        seed: for the held-out choice.
        answers: `source` keeps recorded answers, `target` has the target write the last one anew, and what
            follows prompts of running text.
        answer_tokens: longest answer the target writes, and longest recorded one that is the only label.
        answer_batch: prompts that the target answers together.
        answer_batch_tokens: most tokens of them, answers and padding included.
        labels: of conversations: `answers`, or `last_answer`, which makes all before it the prompt.
        question: `prompt` leaves questions unlabelled; `response` makes the last one a label together with
            its answer, where it can be told from the context, so that the prompt is the context alone.
        prompt_tokens: shortest and longest prompt that running text is cut into; None: all of it is labels.
        mask: labels of conversations: `template` reads the chat template's generation marks, `prefix` renders
            the turns one by one, `all` makes every token a label.
        append_eos: end raw text with the end-of-sequence token.
        stages: how rows are packed over the run.
        val_rows: most packed rows of validation data.
        workers: loading processes; a row is cut from a memory map in about a millisecond, so 0 is fine.
    """

    name: str
    sources: tuple[SourceConfig, ...]
    stages: tuple[Stage, ...] = ()
    max_doc_tokens: int | None = None
    min_doc_tokens: int = 2
    long_documents: str = "split"
    val_fraction: float = 0.0
    seed: int = 0
    answers: str = "source"
    answer_tokens: int = 1024
    answer_batch: int = 8
    answer_batch_tokens: int = 262144
    labels: str = "answers"
    question: str = "prompt"
    prompt_tokens: tuple[int, int] | None = None
    mask: str = "template"
    append_eos: bool = False
    val_rows: int = 64
    workers: int = 0

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> DataConfig:
        """From the resolved `data` group.

        Raises:
            ConfigError: an unknown key, or a value that is not allowed.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known - set(FREE_KEYS))
        if unknown:
            raise ConfigError(f"unknown key data.{unknown[0]}; known: {sorted(known)}")
        rest = {k: v for k, v in values.items() if k in known - {"sources", "stages"} and v is not None}
        sources = tuple(SourceConfig.parse(item) for item in values.get("sources") or ())
        stages = tuple(Stage.parse(item) for item in values.get("stages") or ())
        if "prompt_tokens" in rest:
            rest["prompt_tokens"] = _bounds("data.prompt_tokens", rest["prompt_tokens"])
        config = cls(sources=sources, stages=stages, **rest)
        _choice("data.long_documents", config.long_documents, ("split", "error", "truncate"))
        _choice("data.answers", config.answers, ("source", "target"))
        _choice("data.mask", config.mask, ("template", "prefix", "all"))
        _choice("data.labels", config.labels, ("answers", "last_answer"))
        _choice("data.question", config.question, ("prompt", "response"))
        for key in ("answer_tokens", "answer_batch", "answer_batch_tokens"):
            if getattr(config, key) < 1:
                raise ConfigError(f"data.{key}={getattr(config, key)}; allowed: 1 or more")
        if config.labels == "last_answer" and (config.mask == "all" or config.long_documents == "split"):
            raise ConfigError(
                f"data.labels=last_answer with mask={config.mask} long_documents={config.long_documents}; "
                f"allowed: mask=template or prefix, long_documents=truncate or error"
            )
        if config.question == "response" and config.labels == "answers" and not config.asks_target:
            raise ConfigError(
                "data.question=response with data.labels=answers: only the question of a last answer can "
                "become a label; pass data.labels=last_answer"
            )
        if not sources:
            raise ConfigError(f"data.sources of {config.name!r} is empty; give at least one source")
        if config.min_doc_tokens < 2:
            raise ConfigError(
                f"data.min_doc_tokens={config.min_doc_tokens}; allowed: 2 or more (a label needs a past)"
            )
        if not 0 <= config.val_fraction < 1:
            raise ConfigError(f"data.val_fraction={config.val_fraction}; allowed: 0 up to, not including, 1")
        return config

    def written_by_target(self, source: SourceConfig) -> bool:
        """Whether the target writes this source's answers."""
        return (source.answers or self.answers) == "target"

    @property
    def asks_target(self) -> bool:
        """Whether the target writes any answer."""
        return any(self.written_by_target(source) for source in self.sources)

    def content(self) -> dict[str, Any]:
        """The values that the prepared folder depends on: all but those applied while training."""
        values = asdict(self)
        for key in ("stages", "val_rows", "name", "workers", "answer_batch", "answer_batch_tokens"):
            values.pop(key)
        return values


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value}; allowed: {', '.join(allowed)}")


def _bounds(key: str, value: Any) -> tuple[int, int]:
    """Two whole numbers, the first at least 1 and at most the second."""
    whole = isinstance(value, list | tuple) and all(type(item) is int for item in value)
    if not whole or len(value) != 2 or not 1 <= value[0] <= value[1]:
        raise ConfigError(f"{key}={value}; allowed: [SHORTEST, LONGEST] in tokens, 1 <= SHORTEST <= LONGEST")
    return value[0], value[1]
