"""`longtrain eval`: runs a suite with its systems, in one process or in parts, and writes results, tables and
pages.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import files as files_
from longtrain import provenance, tables
from longtrain.config import MERGE
from longtrain.errors import ConfigError
from longtrain.jobs import parts
from longtrain.jobs.eval_setup import Evaluation, named_systems
from longtrain.jobs.finished import compare
from longtrain.journals import journals_in
from longtrain.log import get_logger
from longtrain.progress import Progress

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.config import HarnessKeys, RunConfig
    from longtrain.evaluation.harness.session import Outcome, Session

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
    keys = cfg.evaluation
    if keys.compare is not None:
        compare.run(cfg)
        return
    check(cfg)
    evaluation = Evaluation(
        suite=cfg.suite,
        named=named_systems(cfg.artifacts, cfg.method),
        select=cfg.select,
        target=cfg.target,
        decode=cfg.decode,
        seed=cfg.seed,
        source=cfg.artifact_source,
        run_dir=cfg.run_dir,
    )
    shards, part = keys.shards, keys.part()
    if part is None and shards > 1:
        work = partial(work_part, evaluation, shards)
        logs = journals_in(evaluation.folder)
        parts.run_all(work, shards, logs=logs, device=cfg.target.device_here())
        part = MERGE
    session, artifacts = evaluation.load()
    merging = part == MERGE
    if not merging and not measure(session, int(part or 0), shards):
        return
    with nullcontext(True) if merging else session.finishing() as mine:
        if mine:
            finish(evaluation, session, artifacts, page=keys.page, record=cfg.values)


def measure(session: Session, part: int, shards: int) -> bool:
    """Run one part in this process; True if the other parts are done too."""
    counts = session.counts(shard=part, shards=shards)
    if (systems := len(session.systems)) > 1:
        log.info("systems=%d; progress counts each example once for each of them", systems)
    with Progress(*counts) as bar, parts.stopping() as asked:
        session.work(shard=part, shards=shards, advance=bar.advance, stopping=asked)
    if left := session.missing():
        count = sum(left.values())
        log.info("part=%d of=%d done; examples_left=%d in other parts", part, shards, count)
    return not left


def work_part(
    evaluation: Evaluation,
    shards: int,
    number: int,
    tell: parts.Tell,
    asked_to_stop: Callable[[], bool],
) -> None:
    """Run one part in a process of its own, and report progress to the parent process."""
    session, _ = evaluation.load()
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


def finish(
    evaluation: Evaluation,
    session: Session,
    artifacts: Sequence[Artifact],
    *,
    page: bool,
    record: Mapping[str, Any],
) -> None:
    """Write and print the result of a finished evaluation.

    Args:
        evaluation: what was measured.
        session: its session.
        artifacts: the artifacts that it loaded; the cards of those below `home` show the result.
        page: write the HTML page too.
        record: all keys of the run, for `config.yaml`.

    Raises:
        ConfigError: an example is not done yet.
        LongtrainError: a draft's output differs from plain decoding's.
    """
    from longtrain.evaluation.harness.lossless import enforce
    from longtrain.jobs.exporting import evidence

    outcome = session.finish()
    timings = {**outcome.timings, **speed_of(evaluation.suite.harness, session)}
    examples = files_.jsonl(outcome.examples)
    results = {**outcome.results, "examples_sha256": hashlib.sha256(examples).hexdigest()}
    files = {
        "results.json": files_.sealed(files_.parse_json(files_.as_json(results))),  # parse_json refuses NaN
        "examples.jsonl": examples,
        "timings.json": files_.as_json(timings),
        **reports(outcome, timings, page=page),
    }
    files_.write_files(session.folder, files)
    provenance.write(session.folder, record, protocol=session.protocol.hash)
    evidence.refresh(session.home, evaluation.run_dir, artifacts)
    shown = ("table.md", "speed.md", "budget.png", "acceptance.png", "speed.png", "report.html")
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
        batches=asked.speed_batch,
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

    drawn = pictures(outcome.results, timings)
    files = {"table.md": table(outcome.results, timings).encode(), **drawn}
    if speed := speed_table(outcome.results, timings):
        files["speed.md"] = speed.encode()
    if page:
        files["report.html"] = pages.page(outcome.results, outcome.examples, timings=timings, pictures=drawn)
    return files


def show(outcome: Outcome, timings: dict[str, Any], folder: Path, names: Sequence[str]) -> None:
    """Print the main scores and speeds; the files have the rest."""
    from longtrain.evaluation.reporting.comparisons import speed_summary
    from longtrain.evaluation.reporting.speeds import of_first_tokens
    from longtrain.evaluation.reporting.tables import summary

    header, rows = summary(outcome.results, timings)
    tables.show(header, rows, title=outcome.results["title"])
    header, rows = speed_summary(timings)
    if rows:
        what = "" if of_first_tokens(timings) else ", prefill left out"
        tables.show(header, rows, title=f"Speed on {timings['device']}{what}")
    tables.print_lines(*(f"note: {note}" for note in outcome.results["notes"]))
    tables.print_lines(*(f"{name}: {folder / name}" for name in names))
