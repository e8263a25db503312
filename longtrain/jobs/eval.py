"""`longtrain eval`: runs a suite with its systems, in one process or in parts, and writes results, tables and
pages.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import files as files_
from longtrain import provenance, tables
from longtrain.config import MERGE
from longtrain.errors import ConfigError
from longtrain.jobs import eval_parts
from longtrain.jobs.finished import compare
from longtrain.jobs.setup import load_target, systems_of
from longtrain.journals import journals_in
from longtrain.log import get_logger
from longtrain.progress import Progress
from longtrain.settings import wrong

if TYPE_CHECKING:
    from longtrain.config import DecodeConfig, HarnessKeys, RunConfig
    from longtrain.decoding.evict import Budget
    from longtrain.decoding.roles import TreeShape
    from longtrain.evaluation.harness.session import Outcome, Session
    from longtrain.evaluation.suite import Suite

log = get_logger(__name__)


def run(cfg: RunConfig) -> None:
    """Run the suite `cfg.suite.name`, or the part of it given by `shard`, and write the result when all parts
    are done.

    With `compare`, compare two finished runs instead.

    Raises:
        ConfigError: there is no such suite, a setting is wrong, or a results journal has other settings.
        LongtrainError: the full cache's score is not the recorded one, a part failed, or a draft's output
            differs from plain decoding's (results are written all the same).
    """
    if cfg.evaluation.compare is not None:
        compare.run(cfg)
        return
    check(cfg)
    shards, shard = cfg.evaluation.shards, cfg.evaluation.part()
    if shard is None and shards > 1:
        eval_parts.run_all(work_part, cfg, shards, journals_in(folder_of(cfg)))
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


def work_part(cfg: RunConfig, number: int, tell: eval_parts.Tell, asked_to_stop: Callable[[], bool]) -> None:
    """Run one part in a process of its own, and report progress to the parent process."""
    session, shards = session_of(cfg), cfg.evaluation.shards
    total, before = session.counts(shard=number, shards=shards)
    tell({"total": total, "before": before})
    session.work(
        shard=number,
        shards=shards,
        advance=lambda what, done: tell({"what": what, "done": done}),
        stopping=asked_to_stop,
    )


def check(cfg: RunConfig) -> None:
    """Refuse settings that would otherwise fail only at the end of the run.

    Raises:
        ConfigError: there is no such suite or report, or a key of the suite is wrong.
    """
    from longtrain.evaluation.suites import SUITES
    from longtrain.evaluation.suites.shared import check_settings

    known_suite(cfg.suite.name)
    check_settings(importlib.import_module(SUITES[cfg.suite.name]), cfg.suite.values)


def known_suite(name: str) -> None:
    """Refuse an unknown suite.

    Raises:
        ConfigError: there is no such suite; the message lists the suites.
    """
    from longtrain.evaluation.suites import SUITES

    if name not in SUITES:
        raise ConfigError(f"eval has no suite '{name}'; known: {', '.join(sorted(SUITES))}")


def session_of(cfg: RunConfig) -> Session:
    """Load and check the target, suite and systems that `cfg` names.

    Raises:
        ConfigError: a setting is wrong.
    """
    from longtrain.evaluation.harness.session import Session
    from longtrain.evaluation.suites import SUITES
    from longtrain.systems import Builder

    asked, sampling = cfg.suite.harness, cfg.sampling
    entries, artifacts = systems_of(cfg)
    first = next(iter(artifacts.values()), None)
    target = load_target(cfg, path=first.target.name if first else None)
    module = importlib.import_module(SUITES[cfg.suite.name])
    suite: Suite = module.build(cfg.suite.values, target, seed=cfg.seed, sampling=sampling)
    builder = Builder(
        target,
        budgets_of(asked.budgets),
        shapes_of(cfg.decode, asked.shapes),
        artifacts.__getitem__,
        greedy=sampling.greedy and not any(own_temperatures(suite)),
        shape_of=cfg.decode.one_shape,
    )
    systems = builder.systems(entries, roles=suite.needs, taker=f"suite {suite.name}", own=suite.own_systems)
    return Session(
        target=target,
        suite=suite.meet(suite, systems) if suite.meet else suite,
        systems=systems if suite.full_cache else systems[1:],
        sampling=sampling,
        folder=folder_of(cfg),
        home=cfg.home,
        batch=asked.batch,
        resamples=asked.bootstrap,
        check=asked.check_baseline,
        record=asked.record,
    )


def own_temperatures(suite: Suite) -> Iterator[float]:
    """The temperatures that tasks set for their answers."""
    from longtrain.evaluation.task import Task

    for task in suite.tasks:
        if isinstance(task, Task):
            yield task.temperature or 0.0


def folder_of(cfg: RunConfig) -> Path:
    """The folder of the suite's files."""
    return cfg.run_dir / "eval" / cfg.suite.name


def budgets_of(values: Any) -> tuple[Budget, ...]:
    """Parse budgets: whole numbers are tokens, numbers below 1 are shares of the prompt.

    May be empty if no system evicts.

    Raises:
        ConfigError: a value is neither, or the list mixes both.
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


def shapes_of(decode: DecodeConfig, asked: Sequence[Sequence[int]] | None) -> list[TreeShape]:
    """The shapes of the drafted tree to measure; empty if `decode.shape` is empty.

    Args:
        decode: the group `decode`.
        asked: widths of each shape; empty: the shape of `decode`.

    Raises:
        ConfigError: a shape drafts nothing.
    """
    if asked and not all(asked):
        shown = [list(one) for one in asked]
        raise wrong("suite.shapes", shown, "lists of widths, e.g. [1,1,1,1] or [4,8,8]")
    shapes = [decode.one_shape(widths) for widths in asked] if asked else [decode.one_shape()]
    return [shape for shape in shapes if shape.widths]


def finish(cfg: RunConfig, session: Session) -> None:
    """Write and print the result of a finished evaluation.

    Raises:
        ConfigError: an example is not done yet.
        LongtrainError: a draft's output differs from plain decoding's.
    """
    from longtrain.evaluation.harness.lossless import enforce
    from longtrain.jobs.exporting import evidence

    outcome = session.finish()
    timings = {**outcome.timings, **speed_of(cfg.suite.harness, session)}
    examples = files_.jsonl(outcome.examples)
    results = {**outcome.results, "examples_sha256": hashlib.sha256(examples).hexdigest()}
    files = {
        "results.json": files_.sealed(files_.parse_json(files_.as_json(results))),  # parse_json refuses NaN
        "examples.jsonl": examples,
        "timings.json": files_.as_json(timings),
        **reports(outcome, timings, page=cfg.evaluation.page),
    }
    files_.write_files(session.folder, files)
    provenance.write(session.folder, cfg.values, protocol=session.protocol.hash)
    evidence.refresh(cfg.home, cfg.run_dir, systems_of(cfg)[1].values())
    shown = ("table.md", "speed.md", "acceptance.png", "report.html")
    show(outcome, timings, session.folder, [name for name in files if name in shown])
    enforce(outcome.results)


def speed_of(asked: HarnessKeys, session: Session) -> dict[str, Any]:
    """Time the systems alternately on a few prompts, if the suite asks for it (`suite.speed_prompts`)."""
    from longtrain.evaluation.harness.speed import SpeedTest

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


def reports(outcome: Outcome, timings: dict[str, Any], *, page: bool) -> dict[str, bytes]:
    """The files of tables, pictures and, if `page` is True, the HTML page."""
    from longtrain.evaluation.reporting import page as pages
    from longtrain.evaluation.reporting.comparisons import speed_table
    from longtrain.evaluation.reporting.pictures import pictures
    from longtrain.evaluation.reporting.tables import table

    drawn = pictures(outcome.results)
    files = {"table.md": table(outcome.results).encode(), **drawn}
    if speed := speed_table(outcome.results, timings):
        files["speed.md"] = speed.encode()
    if page:
        files["report.html"] = pages.page(outcome.results, outcome.examples, timings=timings, pictures=drawn)
    return files


def show(outcome: Outcome, timings: dict[str, Any], folder: Path, names: Sequence[str]) -> None:
    """Print the main scores and speeds; the files have the rest."""
    from longtrain.evaluation.reporting.comparisons import of_first_tokens, speed_summary
    from longtrain.evaluation.reporting.tables import summary

    header, rows = summary(outcome.results)
    tables.show(header, rows, title=outcome.results["title"])
    header, rows = speed_summary(timings)
    if rows:
        what = "" if of_first_tokens(timings) else ", prefill left out"
        tables.show(header, rows, title=f"Speed on {timings['device']}{what}")
    tables.print_lines(*(f"note: {note}" for note in outcome.results["notes"]))
    tables.print_lines(*(f"{name}: {folder / name}" for name in names))
