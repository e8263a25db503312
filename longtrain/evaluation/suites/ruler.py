"""Suite `ruler`: RULER's 13 tasks at several lengths, generated for the target's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.data.read.files import local_file
from longtrain.errors import ConfigError, DataError, LongtrainError, first_line
from longtrain.evaluation.prompts import Encoded, chat_note
from longtrain.evaluation.published import Published
from longtrain.evaluation.ruler.generate import Generator, RulerExample
from longtrain.evaluation.ruler.questions import DATASETS, Questions
from longtrain.evaluation.ruler.sizing import Framing, Material
from longtrain.evaluation.ruler.sources import SOURCES, Haystack, Vocabulary, is_published, vocabulary
from longtrain.evaluation.ruler.tasks import SEED, TASKS
from longtrain.evaluation.scoring.ruler import percent
from longtrain.evaluation.suite import ByTask, Suite, Summary
from longtrain.evaluation.suites.shared import check_lengths, existing_file, hub_rows, settings_of
from longtrain.evaluation.task import Example, Task
from longtrain.log import get_logger
from longtrain.settings import Count, CountOrZero, Lengths, Text, one_of, some_of

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

log = get_logger(__name__)

PUBLISHED = Published(
    "RULER",
    tasks=dict.fromkeys(TASKS),
    lengths=(4096, 8192, 16384, 32768, 65536, 131072),
    settings={"samples": 500, "seed": SEED, "words": "wonderwords"},
)
KEPT = 64
"""Number of prompts per task cached between encoding and scoring."""
CHAT_OPTIONS = {"enable_thinking": False}


class MissingQuestionsError(DataError):
    """The questions of a task are on the Hub, which does not answer."""


@dataclass(frozen=True)
class RulerSettings:
    """The keys of the suite; see conf/suite/ruler.yaml."""

    lengths: Lengths
    tasks: some_of(TASKS)  # type: ignore[valid-type]
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
    """The source material of all prompts of a run.

    Args:
        framing: the tokenizer and chat template.
        haystack: the essays.
        words: the word lists.
        questions: the questions of each data set that a task needs.
        seed: the random seed.
        others: notes on sources that differ from the published files.
        missing: data set -> the reason its questions are not available.
    """

    framing: Framing
    haystack: Haystack
    words: Vocabulary
    questions: Mapping[str, Questions]
    seed: int
    others: tuple[str, ...]
    missing: Mapping[str, str]

    def generator(self, task: str, length: int) -> Generator:
        """The generator of a task's prompts at one length."""
        dataset = str(TASKS[task].options.get("dataset", ""))
        questions = self.questions.get(dataset)
        return Generator(
            Material(TASKS[task], length, self.framing, self.seed, self.haystack, self.words, questions)
        )

    def settings(self, task: str) -> dict[str, Any]:
        """JSON values that determine a task's prompts."""
        options = TASKS[task].options
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


class Prompts:
    """The prompts of a task, generated on demand; the most recent ones are cached."""

    def __init__(self, task: str, sources: Sources) -> None:
        self.framing = sources.framing
        self.generator = cache(lambda length: sources.generator(task, length))
        self._made = lru_cache(maxsize=KEPT)(self._make)

    def made(self, row: Example) -> RulerExample:
        """The generated example (input, answer prefix, answers); an example's fields are a length and an
        index.
        """
        return self._made(int(row.fields["length"]), int(row.fields["index"]))

    def __call__(self, row: Example) -> Encoded:
        """The prompt in the chat template, followed by the answer's prefix; never cut."""
        found = self.made(row)
        return Encoded(tuple(self.framing.ids(found.input, found.answer_prefix, found.solved)))

    def _make(self, length: int, index: int) -> RulerExample:
        return self.generator(length).example(index)


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The tasks named by `suite.tasks` at every length of `suite.lengths`; the seed is `suite.seed`.

    If it names none, all runnable tasks are run; the others are listed with the reason, and
    the result is a variant.

    Raises:
        ConfigError: a wrong setting, a length beyond the target's window or too short for a task, or a task
            without its questions.
        DataError: a file is missing or has another format.
    """
    options = settings_of(RulerSettings, settings)
    check_lengths(options.lengths, 0, target)
    sources = _sources(options, target)
    tasks, skipped = _runnable(options, sources, named=bool(settings["tasks"]))
    asked = {task.name: task.rows for task in tasks}

    def summarise(records: ByTask) -> Summary:
        marks = {
            name: [(int(record.facets["length"]), float(record.score or 0.0)) for record in some]
            for name, some in records.items()
        }
        by_length = {
            str(length): _metrics(
                {name: [mark for at, mark in some if at == length] for name, some in marks.items()}
            )
            for length in options.lengths
        }
        overall = _metrics({name: [mark for _, mark in some] for name, some in marks.items()})
        return Summary(tasks=overall["tasks"], average=overall["average"], extra={"lengths": by_length})

    departures = [*PUBLISHED.departures(asked, vars(options), sampling), *sources.others]
    if not sources.framing.chat:
        if sources.framing.tokenizer.chat_template:
            departures.append("without chat template")
        elif options.chat is None:
            lost = "the tokenizer has none (suite.chat=false if that is intended)"
            departures.append(f"without chat template: {lost}")
    return Suite(
        "ruler",
        tasks,
        summarise=summarise,
        title=PUBLISHED.title,
        departures=[*departures, *skipped],
        notes=[chat_note(sources.framing.tokenizer, True)] if sources.framing.chat else [],
        solvable=True,
    )


def _runnable(options: RulerSettings, sources: Sources, *, named: bool) -> tuple[tuple[Task, ...], list[str]]:
    """The tasks that can be run, and the reasons for those that cannot.

    Args:
        options: settings of the suite.
        sources: the available source material.
        named: True if the tasks were named explicitly; one that cannot be run is then an error.
    """
    tasks, reasons = list[Task](), dict[str, LongtrainError]()
    for name in options.tasks:
        try:
            tasks.append(_checked(name, options, sources))
        except (ConfigError, MissingQuestionsError) as error:
            if named:
                raise
            reasons[name] = error
    if not tasks:
        raise next(iter(reasons.values()))
    skipped = [f"{name} left out: {first_line(error)}" for name, error in reasons.items()]
    for note in skipped:
        log.warning("%s", note)
    return tuple(tasks), skipped


def _checked(name: str, options: RulerSettings, sources: Sources) -> Task:
    """Build a task and generate its first prompts, so that lengths that do not fit are refused before
    anything runs.
    """
    if reason := sources.missing.get(str(TASKS[name].options.get("dataset", ""))):
        raise MissingQuestionsError(reason)
    task = _task(name, options, sources)
    for row in (task.rows[0], task.rows[options.samples - 1]):
        task.encode(row, sources.framing.tokenizer, max_tokens=0)
    return task


def _from_hub(dataset: str) -> Questions:
    """Load the questions of `squad` or `hotpotqa` from the Hub's data set of that name."""
    known = DATASETS[dataset]
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
        if not is_published(key, path):
            others.append(note.format(path.name))
        return path

    words = vocabulary(options.words)
    if options.more_words is not None:
        note = "more words from {}, which is not RULER's english_words.json"
        words = words.with_more(file("more_words", options.more_words, "RULER's list of more words", note))
    if options.haystack is None:
        haystack = Haystack.bundled()
        if any(TASKS[name].options.get("haystack") == "essay" for name in options.tasks):
            others.append(
                "needles hidden in the novels that ship with longtrain, not in Paul Graham's essays"
            )
    else:
        note = "needles hidden in {}, which is no known copy of RULER's PaulGrahamEssays.json"
        haystack = Haystack.read(file("haystack", options.haystack, "RULER's haystack", note))
    needed = {str(TASKS[name].options["dataset"]) for name in options.tasks if name.startswith("qa")}
    questions, missing = dict[str, Questions](), dict[str, str]()
    for dataset in sorted(needed):
        known, where = DATASETS[dataset], getattr(options, dataset)
        if where is None:
            raise ConfigError(
                f"suite.{dataset}=null, and RULER's questions come from there; pass suite.{dataset}=FILE, to "
                f"be had from {known.url}, or leave out qa_1 and qa_2 with suite.tasks"
            )
        if where == known.hub[0] and not local_file(where).exists():
            try:
                questions[dataset] = _from_hub(dataset)
            except DataError as error:
                missing[dataset] = first_line(error)
        else:
            note = f"questions of {dataset} from {{}}, which is not the published file"
            questions[dataset] = known.read(file(dataset, where, f"RULER's questions of {dataset}", note))
    framing = Framing(tokenizer, chat=options.chat, options=CHAT_OPTIONS)
    return Sources(framing, haystack, words, questions, options.seed, tuple(others), missing)


def _task(name: str, options: RulerSettings, sources: Sources) -> Task:
    known, prompts = TASKS[name], Prompts(name, sources)
    rows = tuple(
        Example(f"{length}-{index}", {"length": length, "index": index})
        for length in options.lengths
        for index in range(options.samples)
    )
    return Task(
        name,
        rows,
        known.template + known.answer_prefix,
        known.max_new_tokens,
        known.metric,
        lambda text, row: known.mark(text, prompts.made(row).answers),
        chat=sources.framing.chat,
        protocol=sources.settings(name),
        written=prompts,
        facets_of=lambda row: {"length": int(row.fields["length"])},
        expected=lambda row: prompts.made(row).answers,
    )


def _metrics(marks: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Each task's official score and their plain mean."""
    tasks = {name: percent(some) for name, some in marks.items() if some}
    average = round(sum(tasks.values()) / len(tasks), 2) if tasks else None
    return {"tasks": tasks, "average": average}
