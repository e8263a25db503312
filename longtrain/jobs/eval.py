"""`longtrain eval`: a suite with its systems, alone or in parts, then results, tables and pages."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain import files as files_
from longtrain import provenance, tables
from longtrain.errors import ConfigError
from longtrain.jobs import eval_parts
from longtrain.jobs.finished import compare
from longtrain.jobs.setup import load_target_from, plain, sampling_from, shape_from, systems_of
from longtrain.log import get_logger
from longtrain.progress import Progress
from longtrain.settings import Count, CountOrZero, convert, read, wrong

if TYPE_CHECKING:
    from longtrain.decoding.evict import Budget
    from longtrain.decoding.roles import TreeShape
    from longtrain.evaluation.harness.session import Outcome, Session
    from longtrain.evaluation.suite import Suite

log = get_logger(__name__)

MERGE = "merge"


@dataclass(frozen=True)
class EvalSettings:
    """The keys of `suite` that say how any suite is run.

    Args:
        batch: examples decoded together.
        bootstrap: resamples of examples behind the 95% intervals.
        check_baseline: whether the full cache's score must be the recorded one.
        record: whether the full cache's score is recorded.
        budgets: rows that evicting systems keep, or shares of the prompt.
        shapes: widths of the trees that drafts are measured with; none: `decode.shape`.
        speed_prompts: prompts of each task, or length, that are timed.
        speed_batch: prompts timed together.
        speed_tokens: tokens of a timed answer; None: as many as the task has.
    """

    batch: Count
    bootstrap: Count
    check_baseline: bool = True
    record: bool = False
    budgets: Any = None
    shapes: tuple[tuple[Count, ...], ...] | None = None
    speed_prompts: CountOrZero = 0
    speed_batch: Count = 1
    speed_tokens: Count | None = None


def run(cfg: DictConfig) -> None:
    """Run the suite `cfg.suite.name`, or the part of it that `shard` asks for, and write what is complete.

    With `cfg.compare` two finished runs are compared, and nothing is run.

    Raises:
        ConfigError: no such suite, a setting is wrong, or a ledger holds other settings.
        LongtrainError: the full cache is not what was recorded, a part failed, or a draft's texts are not
            those of plain decoding (results are written all the same).
    """
    if cfg.compare is not None:
        compare.run(cfg)
        return
    check(cfg)
    shards, shard = parts_of(cfg)
    if shard is None and shards > 1:
        eval_parts.run_all(work_part, cfg, shards, folder_of(cfg) / "ledger")
        shard = MERGE
    session = session_of(cfg)
    if isinstance(shard, str):
        finish(cfg, session)
        return
    counts = session.counts(shard=shard or 0, shards=shards)
    if (systems := len(session.systems)) > 1:
        log.info("systems=%d; progress counts each example once for each of them", systems)
    with Progress(*counts) as bar, eval_parts.stopping() as asked:
        session.work(shard=shard or 0, shards=shards, advance=bar.advance, stopping=asked)
    if left := session.missing():
        count = sum(left.values())
        log.info("part=%d of=%d done; examples_left=%d in other parts", shard, shards, count)
        return
    with session.finishing() as mine:
        if mine:
            finish(cfg, session)


def work_part(cfg: DictConfig, number: int, tell: eval_parts.Tell, asked_to_stop: Callable[[], bool]) -> None:
    """Run one part in a process of its own; whoever started it is told of progress."""
    session, shards = session_of(cfg), int(cfg.shards)
    total, before = session.counts(shard=number, shards=shards)
    tell({"total": total, "before": before})
    session.work(
        shard=number,
        shards=shards,
        advance=lambda what, done: tell({"what": what, "done": done}),
        stopping=asked_to_stop,
    )


def check(cfg: DictConfig) -> None:
    """Refuse what would fail at the very end.

    Raises:
        ConfigError: no such suite or report, a wrong key of the suite, or a package that the report needs is
            missing.
    """
    from longtrain.evaluation.reporting.page import check_plotly
    from longtrain.evaluation.suites import SUITES
    from longtrain.evaluation.suites.shared import check_settings

    known_suite(cfg)
    check_settings(importlib.import_module(SUITES[cfg.suite.name]), plain(cfg.suite))
    if compare.wants_page(cfg):
        check_plotly()


def known_suite(cfg: DictConfig) -> None:
    """Refuse a suite that there is not.

    Raises:
        ConfigError: which ones there are.
    """
    from longtrain.evaluation.suites import SUITES

    if cfg.suite.name not in SUITES:
        raise ConfigError(f"eval has no suite '{cfg.suite.name}'; known: {', '.join(sorted(SUITES))}")


def parts_of(cfg: DictConfig) -> tuple[int, int | str | None]:
    """How many parts there are, and which is asked for: a number, `merge`, or None (all).

    Raises:
        ConfigError: a part that there is not.
    """
    shards: int = convert(cfg.shards, Count, "shards")
    if cfg.shard in (None, MERGE):
        return shards, cfg.shard
    number: int = convert(cfg.shard, int, "shard")
    if not 0 <= number < shards:
        raise wrong("shard", f"{number} shards={shards}", f"0 to {shards - 1}, merge, or null (all)")
    return shards, number


def session_of(cfg: DictConfig) -> Session:
    """Target, suite and systems as `cfg` names them, checked.

    Raises:
        ConfigError: a setting is wrong.
    """
    from longtrain.evaluation.harness.session import Session
    from longtrain.evaluation.suites import SUITES
    from longtrain.systems import Builder

    settings, asked, sampling = plain(cfg.suite), settings_of(cfg), sampling_from(cfg)
    entries, artifacts = systems_of(cfg)
    first = next(iter(artifacts.values()), None)
    target = load_target_from(cfg, path=first.target.name if first else None)
    module = importlib.import_module(SUITES[settings["name"]])
    seed = convert(cfg.seed, int, "seed")
    suite: Suite = module.build(settings, target, seed=seed, sampling=sampling)
    builder = Builder(
        target,
        budgets_of(asked.budgets),
        shapes_of(cfg, asked.shapes),
        artifacts.__getitem__,
        greedy=sampling.greedy and not any(own_temperatures(suite)),
        shape_of=partial(shape_from, cfg),
    )
    systems = builder.systems(entries, roles=suite.needs, taker=f"suite {suite.name}", own=suite.own_systems)
    return Session(
        target=target,
        suite=suite.meet(suite, systems) if suite.meet else suite,
        systems=systems if suite.full_cache else systems[1:],
        sampling=sampling,
        folder=folder_of(cfg),
        home=Path(cfg.home),
        batch=asked.batch,
        resamples=asked.bootstrap,
        check=asked.check_baseline,
        record=asked.record,
    )


def settings_of(cfg: DictConfig) -> EvalSettings:
    """The keys of the suite that say how it is run.

    Raises:
        ConfigError: a value is not allowed.
    """
    values = plain(cfg.suite)
    return read(EvalSettings, values, "suite", ignore=values)


def own_temperatures(suite: Suite) -> Iterator[float]:
    """Temperatures that tasks set for their own examples."""
    from longtrain.evaluation.task import Task

    for task in suite.tasks:
        if isinstance(task, Task):
            yield from (task.temperature(example) or 0.0 for example in task.examples())


def folder_of(cfg: DictConfig) -> Path:
    """Where the suite's files go."""
    return Path(cfg.run_dir) / "eval" / str(cfg.suite.name)


def budgets_of(values: Any) -> tuple[Budget, ...]:
    """Budgets as they were typed: whole numbers are tokens, numbers below 1 shares of the prompt.

    None are needed where nothing evicts.

    Raises:
        ConfigError: neither, or some of both.
    """
    from longtrain.decoding.evict import Budget

    if not values:
        return ()
    if isinstance(values, list):
        kinds = {type(value) for value in values}
        if kinds == {int} and min(values) >= 1:
            return tuple(Budget(tokens=value) for value in sorted(set(values)))
        if kinds == {float} and all(0 < value <= 1 for value in values):
            return tuple(Budget(ratio=value) for value in sorted(set(values)))
        if kinds == {int, float}:
            whole, shares = ([v for v in values if type(v) is kind] for kind in (int, float))
            rule = "tokens or shares of the prompt, not both in one run; pass "
            remedy = f"suite.budgets={whole}, then suite.budgets={shares} with another name="
            raise wrong("suite.budgets", values, rule + remedy)
    rows = "tokens of 1 or more ([64,128]) or shares of the prompt ([0.1,0.2])"
    raise wrong("suite.budgets", values, rows)


def shapes_of(cfg: DictConfig, asked: Sequence[Sequence[int]] | None) -> list[TreeShape]:
    """Shapes of a draft's tree; none where `decode.shape` is empty.

    Raises:
        ConfigError: a shape that drafts nothing.
    """
    if asked and not all(asked):
        shown = [list(one) for one in asked]
        raise wrong("suite.shapes", shown, "lists of widths, e.g. [1,1,1,1] or [4,8,8]")
    shapes = [shape_from(cfg, widths) for widths in asked] if asked else [shape_from(cfg)]
    return [shape for shape in shapes if shape.widths]


def finish(cfg: DictConfig, session: Session) -> None:
    """Write and show the result of finished work.

    Raises:
        ConfigError: something is not done yet.
        LongtrainError: a draft's texts are not those of plain decoding.
    """
    from longtrain.evaluation.harness.lossless import enforce
    from longtrain.jobs.exporting import evidence

    outcome = session.finish()
    timings = {**outcome.timings, **speed_of(cfg, session)}
    examples = files_.jsonl(outcome.examples)
    results = {**outcome.results, "examples_sha256": hashlib.sha256(examples).hexdigest()}
    files = {
        "results.json": files_.sealed(files_.parse_json(files_.as_json(results))),  # which refuses NaN
        "examples.jsonl": examples,
        "timings.json": files_.as_json(timings),
        **reports(cfg, outcome, timings),
    }
    files_.write_files(session.folder, files)
    provenance.write(session.folder, plain(cfg), protocol=session.protocol.hash)
    evidence.refresh(Path(cfg.home), Path(cfg.run_dir), systems_of(cfg)[1].values())
    shown = ("table.md", "speed.md", "acceptance.png", "report.html")
    show(outcome, timings, session.folder, [name for name in files if name in shown])
    enforce(outcome.results)


def speed_of(cfg: DictConfig, session: Session) -> dict[str, Any]:
    """Systems timed in turn on a few prompts, where the suite asks for it (`suite.speed_prompts`)."""
    from longtrain.evaluation.harness.speed import SpeedTest

    asked = settings_of(cfg)
    if asked.speed_prompts == 0:
        return {}
    test = SpeedTest(
        session.target,
        session.systems,
        session.suite,
        session.sampling,
        prompts=asked.speed_prompts,
        batch=asked.speed_batch,
        tokens=asked.speed_tokens,
    )
    with Progress(test.steps, 0, "timed prompts") as bar:
        return {"speed": test.rows(bar.advance)}


def reports(cfg: DictConfig, outcome: Outcome, timings: dict[str, Any]) -> dict[str, bytes]:
    """Tables, pictures and, where `report=html`, the page."""
    from longtrain.evaluation.reporting.comparisons import speed_table
    from longtrain.evaluation.reporting.page import page
    from longtrain.evaluation.reporting.pictures import pictures
    from longtrain.evaluation.reporting.tables import table

    files = {"table.md": table(outcome.results).encode(), **pictures(outcome.results, timings)}
    if speed := speed_table(outcome.results, timings):
        files["speed.md"] = speed.encode()
    if compare.wants_page(cfg):
        files["report.html"] = page(outcome.results, outcome.examples, timings=timings)
    return files


def show(outcome: Outcome, timings: dict[str, Any], folder: Path, names: Sequence[str]) -> None:
    """The main figures and speeds on the terminal; the files have the rest."""
    from longtrain.evaluation.reporting.comparisons import of_first_tokens, speed_summary
    from longtrain.evaluation.reporting.tables import summary

    header, rows = summary(outcome.results)
    tables.show(header, rows, title=outcome.results["title"])
    header, rows = speed_summary(timings)
    if rows:
        what = "" if of_first_tokens(timings) else ", prefill left out"
        tables.show(header, rows, title=f"Speed on {timings['device']}{what}")
    tables.say(*(f"note: {note}" for note in outcome.results["notes"]))
    tables.say(*(f"{name}: {folder / name}" for name in names))
