"""RULER as a suite: its 13 tasks at several lengths, written for the target's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.data.read.files import local_file
from longtrain.errors import ConfigError
from longtrain.evaluation import ruler
from longtrain.evaluation.metrics.ruler import percent
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.ruler.sources import SOURCES
from longtrain.evaluation.suite import ByTask, Suite, Summary
from longtrain.evaluation.suites.shared import check_lengths, existing_file, hub_rows, not_greedy, settings_of
from longtrain.evaluation.task import Example, Facet, Task
from longtrain.settings import Count, CountOrZero, Lengths, Text, one_of, some_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

TITLE = "RULER"
SAMPLES = 500
"""Published examples of a task at a length."""
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
"""Published lengths."""

KEPT = 64
"""Prompts of a task kept in memory between encoding and scoring."""


@dataclass(frozen=True)
class RulerSettings:
    """The keys of the suite; see conf/suite/ruler.yaml."""

    lengths: Lengths
    tasks: some_of(ruler.TASKS)  # type: ignore[valid-type]
    samples: Count
    seed: CountOrZero
    haystack: Text | None
    words: one_of(SOURCES)  # type: ignore[valid-type]
    more_words: Text | None
    squad: Text | None
    hotpotqa: Text | None
    chat: bool | None


@dataclass(frozen=True)
class Sources:
    """What prompts are made of.

    Args:
        framing: tokenizer and chat template.
        haystack: essays.
        words: word lists.
        questions: of each data set that a task needs.
        seed: of everything drawn.
        others: notes of what is not the published file.
    """

    framing: ruler.Framing
    haystack: ruler.Haystack
    words: ruler.Vocabulary
    questions: Mapping[str, ruler.Questions]
    seed: int
    others: tuple[str, ...]

    def generator(self, task: str, length: int) -> ruler.Generator:
        """Writes the prompts of a task at a length."""
        dataset = str(ruler.TASKS[task].options.get("dataset", ""))
        return ruler.Generator(
            task,
            self.framing,
            length=length,
            seed=self.seed,
            haystack=self.haystack,
            words=self.words,
            questions=self.questions.get(dataset),
        )

    def settings(self, task: str) -> dict[str, Any]:
        """JSON values that a task's prompts follow from."""
        options = ruler.TASKS[task].options
        found: dict[str, Any] = {"seed": self.seed, "options": dict(options), "chat": self.framing.chat}
        if options.get("haystack") == "essay":
            found["haystack"] = {"name": self.haystack.name, "sha256": self.haystack.digest}
        if options.get("key") == "words" or task == "cwe":
            found["words"] = {"name": self.words.name, "sha256": self.words.digest}
        if task == "cwe" and self.framing.chat:
            found["solved_example"] = "a chat turn of its own"
        if "dataset" in options:
            questions = self.questions[str(options["dataset"])]
            found["questions"] = {"name": questions.name, "sha256": questions.digest}
        return found


class WrittenExamples:
    """Writes examples when they are asked for; the last ones are kept."""

    def __init__(self, task: str, sources: Sources) -> None:
        self.generator = lru_cache(maxsize=None)(lambda length: sources.generator(task, length))
        self.example = lru_cache(maxsize=KEPT)(self._example)

    def _example(self, length: int, index: int) -> ruler.RulerExample:
        (found,) = self.generator(length).examples(range(index, index + 1))
        return found


@dataclass(frozen=True, eq=False)
class RulerTask(Task):
    """A task at every length: rows hold a length and an index, the prompt is written from these."""

    writer: WrittenExamples = field(kw_only=True)

    def written(self, example: Example) -> ruler.RulerExample:
        """Input, answer prefix and answers."""
        return self.writer.example(example.fields["length"], example.fields["index"])

    def prompt(self, example: Example) -> str:
        """Solved example, input and answer prefix, without the chat template around the input."""
        found = self.written(example)
        return found.solved + found.input + found.answer_prefix

    def size(self, example: Example) -> int:
        """The stated length."""
        return int(example.fields["length"])

    def encode(
        self,
        example: Example,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        answers: Sequence[str] = (),
    ) -> Encoded:
        """The prompt in the chat template, the answer's beginning behind it; never cut."""
        found = self.written(example)
        framing = ruler.Framing(tokenizer, chat=self.chat, options=CHAT_OPTIONS)
        return Encoded(tuple(framing.ids(found.input, found.answer_prefix, found.solved)))

    def facets(self, example: Example) -> dict[str, Facet]:
        """The length."""
        return {"length": int(example.fields["length"])}

    def references(self, example: Example) -> list[str]:
        """The right answers: all are wanted, or any (of the two tasks with questions)."""
        return list(self.written(example).answers)

    def score(self, text: str, example: Example) -> float:
        """The official mark, 0 to 1."""
        return ruler.TASKS[self.name].mark(text, self.written(example).answers)


CHAT_OPTIONS = {"enable_thinking": False}


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The tasks that `suite.tasks` names at every length of `suite.lengths`.

    Args:
        settings: `tasks`, `lengths`, `samples`, `seed`, `haystack`, `words`, `more_words`, `squad`,
            `hotpotqa`, `chat`; see conf/suite/ruler.yaml.
        target: lengths are counted with its tokenizer and must fit its window.
        seed: of the run; RULER has its own (`suite.seed`).
        sampling: how the run decodes; RULER is greedy.

    Raises:
        ConfigError: a wrong setting, a length beyond the target's window or too short for a task, or a task
            without its questions.
        DataError: a file is missing or of another format.
    """
    options = settings_of(RulerSettings, settings)
    check_lengths(options.lengths, 0, target)
    sources = _sources(options, target)
    tasks = tuple(_task(name, options, sources) for name in options.tasks)
    for task in tasks:
        task.written(task.rows[0])  # the shortest length of each task: one that does not fit is refused now
        task.written(Example("", {"length": options.lengths[0], "index": options.samples - 1}))
    notes = [*_notes(options, sources), *not_greedy(sampling)]
    title = f"Variant of {TITLE}" if notes else TITLE

    def summarise(records: ByTask) -> Summary:
        marks = {
            name: [(int(record.facets["length"]), float(record.score or 0.0)) for record in some]
            for name, some in records.items()
        }
        by_length = {
            str(length): _figures(
                {name: [mark for at, mark in some if at == length] for name, some in marks.items()}
            )
            for length in options.lengths
        }
        overall = _figures({name: [mark for _, mark in some] for name, some in marks.items()})
        return Summary(title, tuple(notes), overall["tasks"], overall["average"], {"lengths": by_length})

    return Suite("ruler", tasks, summarise=summarise)


def _from_hub(dataset: str) -> ruler.Questions:
    """The questions of `squad` or `hotpotqa` from the Hub's data set of that name."""
    known = ruler.DATASETS[dataset]
    hub, config = known.hub
    instead = (
        f"pass suite.{dataset}=FILE, to be had from {known.url}, or leave out qa_1 and qa_2 with suite.tasks"
    )
    what = f"RULER's questions of {dataset}"
    found = hub_rows(hub, what, instead, split="validation", config=config)
    return known.of_rows([row for _, row in found], hub)


def _sources(options: RulerSettings, target: Target) -> Sources:
    tokenizer = target.require_tokenizer()
    others: list[str] = []

    def file(key: str, where: str, what: str, note: str) -> Path:
        path = existing_file(where, what)
        if not ruler.is_published(key, path):
            others.append(note.format(path.name))
        return path

    words = ruler.vocabulary(options.words)
    if options.more_words is not None:
        note = "more words from {}, which is not RULER's english_words.json"
        words = words.with_more(file("more_words", options.more_words, "RULER's list of more words", note))
    if options.haystack is None:
        haystack = ruler.Haystack.bundled()
        if _has_essays(options.tasks):
            others.append(
                "needles hidden in the novels that ship with longtrain, not in Paul Graham's essays"
            )
    else:
        note = "needles hidden in {}, which is no known copy of RULER's PaulGrahamEssays.json"
        haystack = ruler.Haystack.read(file("haystack", options.haystack, "RULER's haystack", note))
    needed = {str(ruler.TASKS[name].options["dataset"]) for name in options.tasks if name.startswith("qa")}
    questions = {}
    for dataset in sorted(needed):
        known, where = ruler.DATASETS[dataset], getattr(options, dataset)
        if where is None:
            raise ConfigError(
                f"suite.{dataset}=null, and RULER's questions come from there; pass suite.{dataset}=FILE, to "
                f"be had from {known.url}, or leave out qa_1 and qa_2 with suite.tasks"
            )
        if where == known.hub[0] and not local_file(where).exists():
            questions[dataset] = _from_hub(dataset)
        else:
            note = f"questions of {dataset} from {{}}, which is not the published file"
            questions[dataset] = known.read(file(dataset, where, f"RULER's questions of {dataset}", note))
    framing = ruler.Framing(tokenizer, chat=options.chat, options=CHAT_OPTIONS)
    return Sources(framing, haystack, words, questions, options.seed, tuple(others))


def _task(name: str, options: RulerSettings, sources: Sources) -> RulerTask:
    known = ruler.TASKS[name]
    rows = tuple(
        Example(f"{length}-{index}", {"length": length, "index": index})
        for length in options.lengths
        for index in range(options.samples)
    )
    return RulerTask(
        name,
        rows,
        known.wording.template + known.wording.answer_prefix,
        known.max_new_tokens,
        known.metric,
        None,
        chat=sources.framing.chat,
        protocol=sources.settings(name),
        writer=WrittenExamples(name, sources),
    )


def _notes(options: RulerSettings, sources: Sources) -> list[str]:
    """Every departure from the published benchmark."""
    notes = []
    if len(options.tasks) < len(ruler.TASKS):
        notes.append(f"{len(options.tasks)} of {len(ruler.TASKS)} tasks")
    if others := [str(length) for length in options.lengths if length not in LENGTHS]:
        notes.append(f"lengths that are not published: {', '.join(others)}")
    if options.samples != SAMPLES:
        notes.append(f"examples of a task at each length: {options.samples} instead of {SAMPLES}")
    if options.seed != ruler.SEED:
        notes.append(f"seed {options.seed} instead of {ruler.SEED}")
    notes += sources.others
    if options.words != "wonderwords":
        notes.append("keys and words from longtrain's lists, not from wonderwords")
    if not sources.framing.chat:
        if sources.framing.tokenizer.chat_template:
            notes.append("without chat template")
        elif options.chat is None:
            notes.append("without chat template: the tokenizer has none (suite.chat=false says it is meant)")
    return notes


def _has_essays(names: Sequence[str]) -> bool:
    return any(ruler.TASKS[name].options.get("haystack") == "essay" for name in names)


def _figures(marks: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Each task's official figure and their plain mean."""
    tasks = {name: percent(some) for name, some in marks.items() if some}
    average = round(sum(tasks.values()) / len(tasks), 2) if tasks else None
    return {"tasks": tasks, "average": average}
