"""`longtrain eval` with a suite of the harness: work, alone or in parts, then results, tables and pages."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain import files as files_
from longtrain import provenance
from longtrain.errors import ConfigError
from longtrain.jobs import eval_parts
from longtrain.jobs.setup import convert, load_target_from, plain, sampling_from, shape_from, systems_of
from longtrain.log import get_logger
from longtrain.progress import Progress
from longtrain.settings import wrong

if TYPE_CHECKING:
    from longtrain.decoding.evict import Budget
    from longtrain.decoding.roles import TreeShape
    from longtrain.evaluation.harness.session import Outcome, Session
    from longtrain.evaluation.suite import Suite

log = get_logger(__name__)

MERGE = "merge"


def run(cfg: DictConfig) -> None:
    """Run the suite `cfg.suite.name`, or the part of it that `shard` asks for, and write what is complete.

    Raises:
        ConfigError: a setting is wrong, or a ledger holds other settings.
        LongtrainError: the full cache is not what was recorded, a part failed, or a draft's texts are not
            those of plain decoding (results are written all the same).
    """
    check(cfg)
    shards, shard = parts_of(cfg)
    if shard is None and shards > 1:
        eval_parts.run_all(cfg, shards)
        shard = MERGE
    session = session_of(cfg)
    if isinstance(shard, str):
        finish(cfg, session)
        return
    with Progress(*session.counts(shard=shard or 0, shards=shards)) as bar, stopping() as asked:
        session.work(shard=shard or 0, shards=shards, advance=bar.advance, stopping=asked)
    left = session.missing()
    if left:
        count = sum(left.values())
        log.info("part=%d of=%d done; examples_left=%d in other parts", shard, shards, count)
        return
    with session.finishing() as mine:
        if mine:
            finish(cfg, session)


def check(cfg: DictConfig) -> None:
    """Refuse what would fail at the very end.

    Raises:
        ConfigError: no such report, or a package that it needs is missing.
    """
    from longtrain.evaluation.reporting.page import check_plotly

    if cfg.report not in (None, "html"):
        raise ConfigError(f"report={cfg.report}; allowed: html, or null (Markdown and JSON alone)")
    if cfg.report == "html":
        check_plotly()


def parts_of(cfg: DictConfig) -> tuple[int, int | str | None]:
    """How many parts there are, and which is asked for: a number, `merge`, or None (all).

    Raises:
        ConfigError: a part that there is not.
    """
    shards, shard = convert(cfg.shards, int, "shards"), cfg.shard
    if shards < 1:
        raise ConfigError(f"shards={shards}; allowed: 1 or more")
    if shard in (None, MERGE):
        return shards, shard
    number = convert(shard, int, "shard")
    if not 0 <= number < shards:
        raise ConfigError(f"shard={number} shards={shards}; allowed: 0 to {shards - 1}, merge, or null (all)")
    return shards, int(number)


def session_of(cfg: DictConfig) -> Session:
    """Target, suite and systems as `cfg` names them, checked.

    Raises:
        ConfigError: a setting is wrong.
    """
    from longtrain.evaluation.harness.session import Session
    from longtrain.evaluation.suites import SUITES, drafting
    from longtrain.systems import Builder

    suite_cfg = plain(cfg.suite)
    counts = {key: convert(suite_cfg[key], int, f"suite.{key}") for key in ("batch", "bootstrap")}
    for key, value in counts.items():
        if value < 1:
            raise ConfigError(f"suite.{key}={value}; allowed: 1 or more")
    flags = {key: convert(suite_cfg[key], bool, f"suite.{key}") for key in ("check_baseline", "record")}
    sampling, seed = sampling_from(cfg), convert(cfg.seed, int, "seed")
    entries, artifacts = systems_of(cfg)
    first = next(iter(artifacts.values()), None)
    target = load_target_from(cfg, path=first.target.name if first else None)
    module = importlib.import_module(SUITES[suite_cfg["name"]])
    suite = module.build(suite_cfg, target, seed=seed, sampling=sampling)
    builder = Builder(
        target,
        budgets_of(suite_cfg["budgets"]),
        shapes_of(cfg, suite_cfg["shapes"]),
        artifacts.__getitem__,
        greedy=sampling.greedy and not any(own_temperatures(suite)),
        shape_of=partial(shape_from, cfg),
    )
    systems = builder.systems(entries, roles=suite.needs, taker=f"suite {suite.name}", own=suite.own_systems)
    suite = drafting.told(suite, systems)
    return Session(
        target=target,
        suite=suite.meet(suite, systems) if suite.meet else suite,
        systems=systems if suite.full_cache else systems[1:],
        sampling=sampling,
        folder=folder_of(cfg),
        home=Path(cfg.home),
        batch=counts["batch"],
        resamples=counts["bootstrap"],
        check=flags["check_baseline"],
        record=flags["record"],
    )


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
        kinds = [{type(value) for value in values} == {kind} for kind in (int, float)]
        if kinds[0] and min(values) >= 1:
            return tuple(Budget(tokens=value) for value in sorted(set(values)))
        if kinds[1] and all(0 < value <= 1 for value in values):
            return tuple(Budget(ratio=value) for value in sorted(set(values)))
        if {type(value) for value in values} == {int, float}:
            whole, shares = ([v for v in values if type(v) is kind] for kind in (int, float))
            raise ConfigError(
                f"suite.budgets={values}; allowed: tokens or shares of the prompt, not both in one run; "
                f"pass suite.budgets={whole}, then suite.budgets={shares} with another name="
            )
    rows = "tokens of 1 or more ([64,128]) or shares of the prompt ([0.1,0.2])"
    raise wrong("suite.budgets", values, rows)


def shapes_of(cfg: DictConfig, values: Any) -> list[TreeShape]:
    """Shapes of a draft's tree; none where `decode.shape` is empty.

    Raises:
        ConfigError: a shape that drafts nothing.
    """
    asked = convert(values or [plain(cfg.decode.shape)], list[Any], "suite.shapes")
    wrong = [widths for widths in asked if not isinstance(widths, list) or (values and not widths)]
    if wrong:
        raise ConfigError(f"suite.shapes has {wrong[0]}; allowed: lists of widths, e.g. [1,1,1,1] or [4,8,8]")
    return [shape_from(cfg, widths) for widths in asked if widths]


def finish(cfg: DictConfig, session: Session) -> None:
    """Write and show the result of finished work.

    Raises:
        ConfigError: something is not done yet.
        LongtrainError: a draft's texts are not those of plain decoding, or a judge judged no answer at all.
    """
    from longtrain.evaluation.exactness import enforce
    from longtrain.evaluation.judge.naming import check_judged

    marker, total = session.suite.marker, 0
    if marker is not None and not session.missing():
        total = marker.count(session.records())
    with Progress(total, 0, "judgements") as bar:
        outcome = session.finish(bar.advance)
    timings = {**outcome.timings, **speed_of(cfg, session)}
    files = {
        "results.json": files_.as_json(outcome.results),
        "examples.jsonl": files_.jsonl(outcome.examples),
        "timings.json": files_.as_json(timings),
        **reports(cfg, outcome, timings),
    }
    files_.write_files(session.folder, files)
    provenance.write(session.folder, plain(cfg), protocol=session.protocol.hash)
    show(outcome, session.folder, [name for name in files if name in ("table.md", "speed.md", "report.html")])
    enforce(exactness_of(outcome.results))
    check_judged(outcome.results)


def speed_of(cfg: DictConfig, session: Session) -> dict[str, Any]:
    """Systems timed in turn on a few prompts, where the suite asks for it (`suite.speed_prompts`)."""
    from longtrain.evaluation.speed import speed_rows, speed_steps

    prompts, batch = (
        convert(cfg.suite.get(key, default), int, f"suite.{key}")
        for key, default in (("speed_prompts", 0), ("speed_batch", 1))
    )
    if prompts < 0 or batch < 1:
        raise ConfigError(
            f"suite.speed_prompts={prompts} suite.speed_batch={batch}; allowed: 0 or more, and 1 or more"
        )
    if prompts == 0:
        return {}
    steps = speed_steps(session.systems, session.suite, prompts=prompts)
    with Progress(steps, 0, "timed prompts") as bar:
        found = speed_rows(
            session.target,
            session.systems,
            session.suite,
            sampling=session.sampling,
            prompts=prompts,
            batch=batch,
            tokens=convert(cfg.suite.get("speed_tokens"), int | None, "suite.speed_tokens"),
            advance=bar.advance,
        )
    return {"speed": found["rows"]}


def reports(cfg: DictConfig, outcome: Outcome, timings: dict[str, Any]) -> dict[str, bytes]:
    """Tables, pictures and, where `report=html`, the page."""
    from longtrain.evaluation.reporting.page import page
    from longtrain.evaluation.reporting.pictures import pictures
    from longtrain.evaluation.reporting.speed import speed_table
    from longtrain.evaluation.reporting.tables import table

    files = {"table.md": table(outcome.results).encode(), **pictures(outcome.results, timings)}
    if speed := speed_table(outcome.results, timings):
        files["speed.md"] = speed.encode()
    if cfg.report == "html":
        files["report.html"] = page(outcome.results, outcome.examples, timings=timings)
    return files


def show(outcome: Outcome, folder: Path, names: list[str]) -> None:
    """The main figures on the terminal; the files have the rest."""
    from rich.console import Console
    from rich.table import Table

    from longtrain.evaluation.reporting.tables import summary

    results = outcome.results
    header, rows = summary(results)
    shown = Table(box=None, header_style="bold", title=results["title"], title_justify="left")
    for number, column in enumerate(header):
        shown.add_column(column, no_wrap=number == 0)
    for row in rows:
        shown.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(shown)
    for note in results["notes"]:
        console.print(f"note: {note}")
    for name in names:
        console.print(f"{name}: {folder / name}", soft_wrap=True)


def exactness_of(results: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """What was compared in assembled results, as `exactness.enforce` takes it."""
    for system in results["systems"]:
        for task in system["tasks"]:
            yield f"{system['name']} in task {task['task']}", task["exactness"]


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM does not end the process: the function given says that it came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def take(number: int, frame: object) -> None:
        came.append(number)
        log.info("signal=SIGTERM the examples at hand are finished first")

    before = signal.signal(signal.SIGTERM, take)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)
