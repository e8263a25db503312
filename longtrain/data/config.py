"""The settings of `conf/data/*.yaml`: sources, treatment of documents, and packing stages of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from longtrain.errors import ConfigError
from longtrain.settings import (
    Count,
    CountOrZero,
    Name,
    NotNegative,
    OneOf,
    Positive,
    Words,
    convert,
    read,
    within,
    wrong,
)

Listed = Annotated[
    list[Any], Words("a list of stages: [{fraction: 1, sequence_tokens: 4096, doc_tokens: 4096}]")
]
NO_STAGES = (
    "data.stages is empty; give e.g. data.stages=[{fraction: 1, sequence_tokens: 4096, doc_tokens: 4096}]"
)
READERS = ("text", "jsonl", "conversations", "tokenised", "manifest", "synthetic")
FREE_KEYS = (
    "text",
    "jsonl",
    "conversations",
    "books",
    "code",
    "instruct",
    "answered",
    "questions",
    "prompts",
    "held_out",
    "licences",
)
"""Keys that a data config may define only for interpolation in its sources and for the command line."""


@dataclass(frozen=True)
class SourceConfig:
    """One source of documents.

    Args:
        reader: one of `READERS`.
        where: a file or folder, a manifest's name, or a synthetic task's name; `bundled:NAME` is text that
            ships with the package.
        kind: text kind (book, code, chat, ...); empty: the adapter's or manifest's.
        adapter: row adapter for `jsonl` and `conversations`; empty: the reader's default.
        columns: column map of the adapter, e.g. `{text: content}`.
        rows: number of rows to read, from the start; None: all.
        weight: passes over this source in an epoch; 0.5 is a random half of its documents.
        split: `train`, `val`, or `auto` (by `val_fraction`).
        optional: skip the source, instead of stopping, when its path is not set.
        options: further keys, passed to a synthetic task.
        held_out: prefix of file names that are not read.
        answers: `source` or `target`, overrides the config's `answers`; empty: the config's.
        prompts: prompts cut from each document of running text, where the config has `prompt_tokens`; 0:
            none, the text is there for synthetic sources to write into.
        licences: which packages are read of a folder with an installed environment (`site-packages`):
            `permissive`, those whose metadata state a permissive licence, or `any`.
    """

    reader: Annotated[str, OneOf(*READERS)]
    where: str | None
    kind: str = ""
    adapter: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    rows: Count | None = None
    weight: int | float = 1.0
    split: Annotated[str, OneOf("auto", "train", "val")] = "auto"
    optional: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    held_out: tuple[str, ...] = ()
    answers: Annotated[str, OneOf("", "source", "target")] = ""
    prompts: CountOrZero = 1
    licences: Annotated[str, OneOf("permissive", "any")] = "permissive"

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> SourceConfig:
        """Read one item of `data.sources`.

        Raises:
            ConfigError: no reader or more than one, an unknown key, or a value out of range.
        """
        readers = [key for key in READERS if key in values]
        if len(readers) != 1:
            raise ConfigError(
                f"data source {dict(values)} names {len(readers)} readers; give one of {READERS}"
            )
        rest = {key: value for key, value in values.items() if key not in readers and value is not None}
        return read(cls, {"reader": readers[0], "where": values[readers[0]], **rest}, "data.sources")

    def __post_init__(self) -> None:
        if not self.weight > 0:  # integers stay integers, or the hash of existing data would change
            raise wrong("data.sources.weight", self.weight, "above 0")


@dataclass(frozen=True)
class PackingStage:
    """A part of the run with one way of packing; its length is one of `steps`, `fraction` and `epochs`.

    Args:
        sequence_tokens: length of a packed sequence (one micro-batch).
        doc_tokens: longest piece of a document in it.
        steps: optimizer steps.
        fraction: share of the run's total steps.
        epochs: passes over the data; the last, incomplete optimizer step is left out.
        recut: cut long documents at other places in each epoch; false: at the same places, so that stored
            features of the pieces are valid in every epoch.
        weights: passes over the documents of a kind in an epoch of this stage, instead of their source's
            `weight`: `{book: 1, chat: 0}`. Kinds that are not named keep it.
    """

    sequence_tokens: Count
    doc_tokens: Annotated[int, within(2)]
    steps: Count | None = None
    fraction: Positive | None = None
    epochs: Positive | None = None
    recut: bool = True
    weights: Annotated[dict[str, NotNegative], Words("{KIND: PASSES}, each 0 or more")] = field(
        default_factory=dict
    )

    @classmethod
    def parse(cls, values: Any) -> PackingStage:
        """Read one item of `data.stages`.

        Raises:
            ConfigError: an unknown or missing key, or a value that is no number or out of range.
        """
        return read(cls, convert(values, Mapping[str, Any], "data.stages item"), "data.stages")

    def __post_init__(self) -> None:
        if self.sequence_tokens < self.doc_tokens:
            raise wrong(
                "data.stages.doc_tokens",
                self.doc_tokens,
                f"doc_tokens <= sequence_tokens={self.sequence_tokens}",
            )
        if sum(length is not None for length in (self.steps, self.fraction, self.epochs)) != 1:
            raise ConfigError(
                f"stage steps={self.steps} fraction={self.fraction} epochs={self.epochs}; give exactly one"
            )


@dataclass(frozen=True)
class DataConfig:
    """The settings of a data mixture.

    Args:
        name: folder under `${home}/data`.
        sources: the sources of documents.
        max_doc_tokens: longest document; None: the target's context.
        min_doc_tokens: shorter documents, and shorter tails of split ones, are dropped.
        long_documents: treatment of documents above the limit: `error`, `truncate`, or `split` (stored whole;
            stages cut them into pieces).
        val_fraction: share of documents held out, chosen by a hash of their names.
        seed: the seed of the choice of held-out documents.
        on_error: treatment of a file, row or conversation that cannot be read: `error` stops, `skip` counts
            it and continues.
        answers: `source` keeps recorded answers; `target` has the target generate the last answer of a
            conversation, and the text after prompts of running text.
        answer_tokens: longest answer that the target generates, and longest recorded one if it is the only
            label.
        answer_batch: prompts that the target answers together.
        answer_batch_tokens: largest number of tokens of such a batch, answers and padding included.
        labels: labels of conversations: all `answers`, or only the `last_answer`, with all before it as the
            prompt.
        question: `prompt` leaves questions unlabelled; `response` labels the last question together with its
            answer, if it can be separated from the context, so that the prompt is only the context.
        prompt_tokens: shortest and longest prompt that running text is cut into; None: every token is a
            label.
        mask: how labels of conversations are found: `template` reads the chat template's generation marks,
            `prefix` renders the turns one by one, `all` makes every token a label; `auto` is `template` where
            the template has marks, else `prefix`.
        append_eos: end raw text with the end-of-sequence token.
        stages: how sequences are packed over the run.
        val_sequences: largest number of packed sequences of validation data.
        workers: loading processes; reading a sequence from the memory map takes about a millisecond, so 0 is
            enough.
        tokenise_workers: processes that tokenise text and conversations; None: one a core, at most 16, for
            8 million characters or more in all sources together, and none for less.
    """

    name: Name
    sources: tuple[SourceConfig, ...]
    stages: tuple[PackingStage, ...] = ()
    max_doc_tokens: Count | None = None
    min_doc_tokens: Annotated[int, within(2), Words("2 or more (a label needs a past)")] = 2
    long_documents: Annotated[str, OneOf("split", "error", "truncate")] = "split"
    val_fraction: int | float = 0.0
    seed: int = 0
    on_error: Annotated[str, OneOf("error", "skip")] = "error"
    answers: Annotated[str, OneOf("source", "target")] = "source"
    answer_tokens: Count = 1024
    answer_batch: Count = 8
    answer_batch_tokens: Count = 262144
    labels: Annotated[str, OneOf("answers", "last_answer")] = "answers"
    question: Annotated[str, OneOf("prompt", "response")] = "prompt"
    prompt_tokens: Annotated[tuple[Count, Count], Words("[SHORTEST, LONGEST] in tokens")] | None = None
    mask: Annotated[str, OneOf("auto", "template", "prefix", "all")] = "auto"
    append_eos: bool = False
    val_sequences: CountOrZero = 64
    workers: CountOrZero = 0
    tokenise_workers: CountOrZero | None = None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> DataConfig:
        """Read the resolved `data` group.

        Raises:
            ConfigError: an unknown key, or a value that is not allowed.
        """
        parts = {
            "sources": tuple(SourceConfig.parse(item) for item in values.get("sources") or ()),
            "stages": tuple(
                PackingStage.parse(item)
                for item in convert(values.get("stages") or (), Listed, "data.stages")
            ),
        }
        rest = {key: value for key, value in values.items() if key not in parts and value is not None}
        return read(cls, {**rest, **parts}, "data", ignore=FREE_KEYS)

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise wrong("data.val_fraction", self.val_fraction, "0 up to, not including, 1")
        if self.prompt_tokens is not None and self.prompt_tokens[0] > self.prompt_tokens[1]:
            raise wrong("data.prompt_tokens", list(self.prompt_tokens), "SHORTEST <= LONGEST")
        if self.labels == "last_answer" and (self.mask == "all" or self.long_documents == "split"):
            raise ConfigError(
                f"data.labels=last_answer with mask={self.mask} long_documents={self.long_documents}; pass "
                "mask=template or prefix, and long_documents=truncate or error"
            )
        if self.question == "response" and self.labels == "answers" and not self.asks_target:
            raise ConfigError(
                "data.question=response with data.labels=answers: only the question of a last answer can "
                "become a label; pass data.labels=last_answer"
            )
        if (total := sum(stage.fraction or 0.0 for stage in self.stages)) > 1 + 1e-6:
            raise wrong(
                "data.stages", f"fractions of {total:g} together", "1 at most, which is the whole run"
            )
        kinds = [source.kind for source in self.sources]
        named = [kind for stage in self.stages for kind in stage.weights if kind not in kinds]
        if named and all(kinds):  # a source without `kind` has its adapter's or manifest's
            raise wrong(
                "data.stages.weights", named[0], f"kinds of data.sources: {', '.join(dict.fromkeys(kinds))}"
            )
        if not self.sources:
            raise ConfigError(f"data.sources of {self.name!r} is empty; give at least one source")

    def written_by_target(self, source: SourceConfig) -> bool:
        """Return True if the target generates this source's answers."""
        return (source.answers or self.answers) == "target"

    @property
    def asks_target(self) -> bool:
        """True if the target generates any answers."""
        return any(self.written_by_target(source) for source in self.sources)

    def content(self) -> dict[str, Any]:
        """Return the values that prepared data depends on: all except those used only while training."""
        values = asdict(self)
        for key in ("stages", "val_sequences", "name", "workers", "tokenise_workers"):
            values.pop(key)
        for key in ("answer_batch", "answer_batch_tokens"):
            values.pop(key)
        return values
