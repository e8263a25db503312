"""`longtrain eval suite=eviction`: accuracy against budget of eviction policies over the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from longtrain import files as files_
from longtrain import provenance
from longtrain.errors import ConfigError
from longtrain.jobs.setup import convert, load_target_from, plain, sampling_from
from longtrain.log import get_logger

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.decoding.evict import Budget
    from longtrain.evaluation.eviction_protocol import Protocol

log = get_logger(__name__)

QUESTIONS = ("prompt", "after")
COUNTS = (
    "prompts",
    "max_new_tokens",
    "batch",
    "samples",
    "rank_prompts",
    "rank_skip",
    "time_prompts",
    "time_batch",
)


def run(cfg: DictConfig) -> None:
    """Measure every policy, then write scores, times, table and pictures; what an earlier run left is used.

    Raises:
        ConfigError: a setting is wrong, or the folder holds pieces of other settings.
    """
    from longtrain.evaluation import eviction, eviction_policies, eviction_report
    from longtrain.evaluation.eviction_scores import Figures
    from longtrain.evaluation.eviction_tasks import make_prompts
    from longtrain.evaluation.pieces import Pieces

    protocol = protocol_of(cfg)
    resamples = convert(cfg.suite.bootstrap, int, "suite.bootstrap")
    if resamples < 1:
        raise ConfigError(f"suite.bootstrap={resamples}; allowed: 1 or more")
    entries, artifacts = _entries(cfg)
    first = next(iter(artifacts.values()), None)
    target = load_target_from(cfg, path=first.target.name if first else None)
    found = eviction_policies.contenders(
        target, entries, protocol, load=artifacts.__getitem__, oracle=bool(cfg.suite.oracle)
    )
    prompts = make_prompts(
        target,
        _texts(cfg),
        tasks=protocol.tasks,
        lengths=protocol.lengths,
        count=protocol.prompts,
        margin=protocol.max_new_tokens,
        seed=protocol.seed,
    )
    folder = Path(cfg.run_dir) / "eval"
    total = len(protocol.lengths) * sum(eviction.answers(one, protocol) for one in found)
    with _Bar(total) as bar:
        pieces = eviction.run(
            target, found, prompts, protocol=protocol, pieces=Pieces(folder / "pieces"), advance=bar.advance
        )
    figures = Figures(found, protocol, pieces, resamples)
    scores = {"target": target.info.name, **figures.scores()}
    timings = {"device": str(target.device), **figures.timings()}
    files = {
        "scores.json": files_.as_json(scores),
        "timings.json": files_.as_json(timings),
        "table.md": eviction_report.table(scores, timings).encode(),
        "accuracy.png": eviction_report.accuracy_picture(scores),
    }
    if timings["rows"]:
        files["overhead.png"] = eviction_report.overhead_picture(scores, timings)
    files_.write_files(folder, files)
    provenance.write(folder, plain(cfg), artifacts={name: str(one.folder) for name, one in artifacts.items()})
    _show(scores, folder / "table.md")


def protocol_of(cfg: DictConfig) -> Protocol:
    """What `cfg.suite`, `cfg.decode` and `cfg.seed` ask for.

    Raises:
        ConfigError: a value of another kind, or out of its range.
    """
    from longtrain.evaluation.eviction_protocol import Protocol
    from longtrain.settings import parse_tokens

    suite = plain(cfg.suite)
    if suite["question"] not in QUESTIONS:
        raise ConfigError(f"suite.question={suite['question']}; allowed: {', '.join(QUESTIONS)}")
    counts = {key: convert(suite[key], int, f"suite.{key}") for key in COUNTS}
    return Protocol(
        lengths=tuple(sorted({parse_tokens(length) for length in suite["lengths"]})),
        budgets=budgets_of(suite["budgets"]),
        tasks=tuple(convert(suite["tasks"], list[str], "suite.tasks")),
        after=suite["question"] == "after",
        sampling=sampling_from(cfg),
        seed=convert(cfg.seed, int, "seed"),
        **counts,
    )


def budgets_of(values: Any) -> tuple[Budget, ...]:
    """Budgets as they were typed: whole numbers are tokens, numbers below 1 shares of the prompt.

    Raises:
        ConfigError: neither, or some of both.
    """
    from longtrain.decoding.evict import Budget

    if isinstance(values, list) and values:
        if all(type(v) is int and v >= 1 for v in values):
            return tuple(Budget(tokens=v) for v in sorted(set(values)))
        if all(type(v) is float and 0 < v <= 1 for v in values):
            return tuple(Budget(ratio=v) for v in sorted(set(values)))
        if all(type(v) is int or type(v) is float for v in values) and len({type(v) for v in values}) == 2:
            whole, shares = ([v for v in values if type(v) is kind] for kind in (int, float))
            raise ConfigError(
                f"suite.budgets={values}; allowed: tokens or shares of the prompt, not both in one run; "
                f"pass suite.budgets={whole}, then suite.budgets={shares} with another name="
            )
    raise ConfigError(
        f"suite.budgets={values}; allowed: tokens of 1 or more ([64,128]) or shares of the prompt ([0.1,0.2])"
    )


def _entries(cfg: DictConfig) -> tuple[list[Any], dict[str, Artifact]]:
    """Entries of the comparison, `artifact=` first, and every artifact that one of them names."""
    from longtrain.artifact import Artifact

    asked = cfg.artifact if isinstance(cfg.artifact, ListConfig | list) else [cfg.artifact]
    entries: list[Any] = [{"artifact": str(where)} for where in asked if where]
    entries += list(plain(cfg.suite.policies)) if cfg.suite.policies else []  # null: none
    wanted = [str(e["artifact"]) for e in entries if isinstance(e, dict) and "artifact" in e]
    return entries, {where: Artifact.load(where, home=cfg.home) for where in dict.fromkeys(wanted)}


def _texts(cfg: DictConfig) -> dict[str, str]:
    from longtrain.assets import asset_dir
    from longtrain.evaluation.contexts import read_texts

    where = cfg.suite.text or asset_dir("bundled") / "text" / "heldout"
    kinds = [str(kind) for kind in cfg.suite.kinds]
    log.info("text=%s", where)
    return {name: text for name, _, text in read_texts(where, kinds=kinds, prose="book")}


def _show(scores: dict[str, Any], path: Path) -> None:
    """Accuracy on the terminal; the table on disk has the rest."""
    from rich.console import Console
    from rich.table import Table

    from longtrain.evaluation.eviction_report import name_of, summary

    shown = Table(box=None, header_style="bold", title=name_of(scores), title_justify="left")
    for column in ("policy", "context", *scores["budgets"]):
        shown.add_column(column, no_wrap=column != "policy")
    for row in summary(scores):
        shown.add_row(*row)
    console = Console(highlight=False)
    console.print(shown)
    console.print(f"all figures: {path}", soft_wrap=True)


class _Bar:
    """A progress line: what is running, answers done and the time left."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __enter__(self) -> _Bar:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.progress.add_task("prompts", total=self.total)
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def advance(self, what: str, done: int) -> None:
        """Count answers."""
        self.progress.update(self.task, advance=done, description=what)
