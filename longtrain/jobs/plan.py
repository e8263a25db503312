"""`longtrain plan`: what a recipe will need, from shapes alone: no weights, no downloads."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from omegaconf import DictConfig

from longtrain import files, methods, provenance
from longtrain.costs import decoding, elastic, hardware, ranks, roofline, training
from longtrain.costs.decoding import Served
from longtrain.costs.hardware import GIB, Gpu
from longtrain.costs.method import CycleCost
from longtrain.costs.model import Sizes
from longtrain.errors import ConfigError
from longtrain.jobs import outline, plan_advice, plan_training
from longtrain.jobs.setup import plain
from longtrain.methods.named import named
from longtrain.settings import Count, Positive, Share, Tokens, Words, convert
from longtrain.settings import read as typed
from longtrain.tables import of_rows, say
from longtrain.targets.info import TargetInfo

if TYPE_CHECKING:
    from longtrain.cache.row_sets import ReadBudget
    from longtrain.methods.spec import MethodSpec

CHAIN = (1, 1, 1, 1)
"""Drafted tokens of a cycle where `decode.shape` names no chain."""
CONTEXTS = Annotated[tuple[Tokens, ...], Words("token counts such as [8k, 128k]")]

KEYS: dict[str, Any] = {
    "network_gbits": Positive,
    "tokens": Tokens | None,
    "contexts": CONTEXTS,
    "batch": Count,
    "acceptance": Share,
}
"""The job's own numbers and what each may be."""


@dataclass(frozen=True)
class RecipePlan:
    """What is planned.

    Args:
        cfg: the resolved configuration.
        info: the target.
        tied: whether the target's head is its embedding.
        spec: the method; None where none is chosen.
        config: its settings.
    """

    cfg: DictConfig
    info: TargetInfo
    tied: bool
    spec: MethodSpec | None
    config: Any

    @property
    def size(self) -> Sizes:
        """The target in numbers."""
        return Sizes.of(self.info)

    @property
    def itemsize(self) -> int:
        """Bytes of one of the target's numbers."""
        return outline.itemsize_of(self.cfg)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the target's weights."""
        return training.target_parameters(self.size, tied=self.tied) * self.itemsize

    @property
    def gpu(self) -> Gpu:
        """The device of `gpu=`."""
        return hardware.named(str(self.cfg.gpu), "gpu")

    @property
    def on_cpu(self) -> bool:
        """Whether training runs on a processor, of whose speed nothing is known here."""
        return str(self.cfg.trainer.get("accelerator")) == "cpu"

    @property
    def facts(self) -> list[str]:
        """Lines about the target."""
        kv = training.kv_bytes_per_token(self.size, itemsize=self.itemsize)
        billions = self.weight_bytes / self.itemsize / 1e9
        shape = (
            "" if outline.config_file(self.info.name) else " (by target.shape: no config.json of it is here)"
        )
        given = self.cfg.target.get("shape")
        name = self.info.name or (given if isinstance(given, str) else "of the given shape")
        return [
            f"target    {name}: {billions:.3g} B weights, {self.weight_bytes / GIB:.3g} GiB{shape}",
            f"KV cache  {kv / 1024:.4g} KiB a token; {kv * self.info.max_positions / GIB:.3g} GiB at its "
            f"{self.info.max_positions} positions",
        ]


def run(cfg: DictConfig) -> None:
    """Print what decoding takes at some contexts, or the estimates of each stage's rows where data are given.

    Raises:
        ConfigError: no target, no stages, or the target's shape is not at hand.
    """
    check(cfg)
    spec = methods.get(cfg.method.name) if cfg.method else None
    info, tied = outline.target_shape(cfg)
    config = typed(spec.config, plain(cfg.method), "method", ignore=("name",)) if spec else None
    plan = RecipePlan(cfg, info, tied, spec, config)
    if spec is None or spec.objective is None or not cfg.data:
        if cfg.json:
            raise ConfigError("json=FILE is written for a recipe that trains; leave it out for decoding")
        say(*plan.facts, *_decoding(plan))
        return
    if cfg.cache is not None:
        raise ConfigError(
            f"cache={plain(cfg.cache)}: of a recipe that trains, training is planned; for decoding with a "
            "cache pass target=NAME method=NAME and no recipe"
        )
    lines, values = _training(plan)
    say(*plan.facts, *lines)
    if cfg.json:
        path = Path(str(cfg.json)).expanduser()
        files.write_files(path.parent, {path.name: files.as_json(values)})
        say(f"written   {path}")


def check(cfg: DictConfig) -> None:
    """Refuse values that no plan can be made with; loads nothing.

    Raises:
        ConfigError: no target, or its shape is not at hand; or a value of the plan's own keys is wrong.
    """
    if not cfg.target:
        raise ConfigError(
            "plan needs a recipe; pass +recipe=NAME (longtrain recipes lists them), or for decoding alone "
            "target=NAME, with a method where one is wanted"
        )
    hardware.named(str(cfg.gpu), "gpu")
    for key, kind in KEYS.items():
        convert(plain(cfg[key]), kind, key)
    outline.target_shape(cfg)


def _decoding(plan: RecipePlan) -> list[str]:
    """A table of plain decoding and, where the method's cycles are known, one of them.

    Raises:
        ConfigError: a key has a wrong value, or the method does not serve the target.
    """
    cfg, gpu, batch = plan.cfg, plan.gpu, convert(plan.cfg.batch, Count, "batch")
    acceptance = convert(cfg.acceptance, Share, "acceptance")
    contexts = sorted(set(convert(plain(cfg.contexts), CONTEXTS, "contexts")))
    within = [context for context in contexts if context <= plan.info.max_positions]
    if not within:
        raise ConfigError(
            f"contexts={plain(cfg.contexts)}; allowed: 1 to the target's {plan.info.max_positions} positions"
        )
    served = Served(plan.size, gpu, batch, plan.itemsize, plan.weight_bytes)
    rows = [decoding.plain(served, context) for context in within]
    lines = [
        f"Decoding {batch} sequence{'s' if batch > 1 else ''} on one {gpu.name} of "
        f"{gpu.memory_bytes / 1e9:.0f} GB; least: no implementation is faster.",
        of_rows(rows, decoding.PLAIN_COLUMNS),
    ]
    chosen = 0
    if cfg.cache is None:
        lines.append(served.verdict(rows[-1]))
    if plan.spec is not None and plan.spec.cost.cycle is None:
        lines.append(_not_in_the_table(plan.spec))
    elif plan.spec is not None and plan.spec.cost.cycle is not None:
        widths = _chain(cfg)
        if plan.spec.objective is not None:
            outline.trained_weights(plan.spec, plan.config, plan.info)  # refuses what cannot be built
        cost = plan.spec.cost.cycle(plan.config, plan.size, widths, plan.itemsize)
        if cost.before:
            budget = _budget(plan)
            chosen, cost = budget.rows, cost.reading(budget.rows, every=budget.every)
        rows = [row | decoding.speculative(served, cost, row, rate=acceptance) for row in rows]
        lines += [_about(cost, len(widths), acceptance, chosen), of_rows(rows, decoding.CYCLE_COLUMNS)]
        if cfg.cache is None:
            lines.append(served.verdict(rows[-1], own=True))
    return [
        *lines,
        *_elastic(plan, served, rows if chosen else []),
        "Estimates by arithmetic; measure with: longtrain bench suite=engine",
    ]


def _about(cost: CycleCost, drafted: int, acceptance: float, chosen: int) -> str:
    """What the table of a method's cycles shows."""
    if chosen:
        return (
            f"{cost.title}: expected times; {chosen} rows read a step (evict.budget_tokens), chosen by "
            "scores of all."
        )
    if cost.draft:
        return (
            f"{cost.title}: expected times; {drafted} drafted tokens a cycle, each accepted with probability "
            f"{acceptance:g} (acceptance=); speed is over plain decoding on the plain cache."
        )
    return f"The cache of {cost.title} without its draft: expected times."


def _not_in_the_table(spec: MethodSpec) -> str:
    """What to do about a method of whose steps nothing is known here."""
    left_out = f"The table leaves method={spec.name} out: nothing is known here of what its steps take."
    if spec.attach is None:
        return f"{left_out} For its training pass +recipe=NAME (longtrain recipes lists them)."
    bench = f"longtrain bench suite=engine method={spec.name}"
    if spec.objective is None:
        return f"{left_out} Measure them: {bench}"
    return (
        f"{left_out} Measure them: {bench} artifact=NAME; for its training pass +recipe=NAME (longtrain "
        "recipes lists them)."
    )


def _budget(plan: RecipePlan) -> ReadBudget:
    """What a step reads where rows are chosen."""
    from longtrain.methods.read_budget import read_budget

    keys = {"budget_tokens": plan.cfg.evict.get("budget_tokens"), **plain(plan.cfg.select)}
    found = read_budget("plan", keys)
    if found.dense_layers:
        raise ConfigError(
            f"select.dense_layers={list(found.dense_layers)}; plan counts steps in which every layer "
            "chooses; leave it out"
        )
    return found


def _elastic(plan: RecipePlan, served: Served, steps: list[dict[str, Any]]) -> list[str]:
    """A table of thresholds for `cache=elastic`, and one of steps that choose; nothing without it.

    Args:
        plan: what is planned.
        served: the target on a device.
        steps: rows of steps that choose what they read, with all rows on the device; empty: no such steps.

    Raises:
        ConfigError: another cache, a wrong option, a method of whose steps with it nothing is known, or a cap
            that the chosen rows alone exceed.
    """
    cfg = plan.cfg
    if (wanted := named("cache", plain(cfg.cache), "plan")) is None:
        return []
    if wanted.name != "elastic":
        raise ConfigError(f"cache={wanted.name}; plan knows: elastic, or null")
    if plan.spec is not None and not steps:
        raise ConfigError(
            f"cache=elastic with method={plan.spec.name}: nothing is known here of such steps, if there are "
            "any (rows must be chosen before the layers run); leave method out for the thresholds alone"
        )
    from longtrain.cache.elastic import Offloading

    offloading = typed(Offloading, wanted.options, "cache elastic")
    batch, size, budget = served.batch, plan.size, _budget(plan)
    chosen = budget.rows
    memory = elastic.ElasticMemory(
        size.n_layers,
        size.n_kv_heads,
        size.head_dim,
        batch,
        plan.itemsize,
        slots=chosen + 2 * budget.every - 1,  # as `ElasticCache.reserve` takes them where nothing is drafted
        page_rows=offloading.page_rows,
    )
    longest, cap = plan.info.max_positions, offloading.memory_gib
    about = f"Elastic cache of {batch} sequence{'s' if batch > 1 else ''}, {chosen} rows read a step"
    if cap is None:
        slots, host = memory.bytes(0, size.n_layers) / GIB, longest * memory.row_bytes * size.n_layers / GIB
        lines = [
            f"{about}: all layers on the host from the start ({host:.3g} GiB pinned at {longest} tokens), "
            f"{slots:.3g} GiB on the device"
        ]
    else:
        rows = elastic.threshold_rows(memory, cap * GIB, longest)
        lines = [
            f"{about}, at most {cap:g} GiB on the device; layers leave it from line to line.",
            of_rows(rows, elastic.COLUMNS),
        ]
    if not steps:
        return lines
    away = [size.n_layers if cap is None else memory.on_host(row["context"], cap * GIB) for row in steps]
    rows = [
        row | decoding.offloaded(served, row, rows=chosen, on_host=count)
        for row, count in zip(steps, away, strict=True)
    ]
    return [*lines, "Expected steps of it:", of_rows(rows, decoding.HOST_COLUMNS)]


def _chain(cfg: DictConfig) -> tuple[int, ...]:
    """The chain that `decode.shape` names; the default one where it names none."""
    shape = plain(cfg.decode.shape)
    is_chain = isinstance(shape, list) and bool(shape) and all(width == 1 for width in shape)
    return tuple(shape) if is_chain else CHAIN


def _training(plan: RecipePlan) -> tuple[list[str], dict[str, Any]]:
    """What is trained, a table of the stages, what fits and what it leaves on the disk; and all as values.

    Raises:
        ConfigError: there are no stages, or ranks, strategy or features that cannot be.
    """
    from longtrain.jobs.prepare import data_config

    cfg, spec = plan.cfg, plan.spec
    assert spec is not None
    if not cfg.data.stages:
        raise ConfigError("data.stages is empty; a recipe says how its rows are packed")
    training = plan_training.planned(plan)
    layout, rows = training.given.layout, plan_training.stages_of(training)
    left, memory = plan_training.disk_of(training), plan_advice.most(rows)
    lines = [
        f"decoding  {_longest_step(plan)}",
        f"trained   {training.trained / 1e6:.4g} M weights",
        f"ranks     {layout.ranks}: {layout.in_words()}",
        f"a rank    {plan_advice.parts_in_words(memory)}; host memory of a machine "
        f"{memory['host'] / GIB:.3g} GiB",
        f"disk      {plan_advice.disk_in_words(left)}",
        of_rows(rows, plan_training.COLUMNS),
    ]
    values: dict[str, Any] = {
        "command": provenance.typed_command(sys.argv),
        "target": {
            "name": plan.info.name,
            "bytes": plan.weight_bytes,
            **asdict(plan.size),
            "tied": plan.tied,
        },
        "method": {"name": spec.name, **asdict(plan.config), "trained": training.trained},
        "layout": asdict(layout),
        "stages": rows,
        "disk_bytes": left,
        "assumptions": ranks.assumptions(plan.gpu, layout),
    }
    if plan.on_cpu:
        lines.append("No times are estimated for trainer.accelerator=cpu, nor what fits.")
    else:
        verdict, advised = plan_advice.verdict(training, rows)
        lines += [*verdict, plan_training.duration(training, rows)]
        values["advice"] = advised
    lines.append(f"All figures are estimates; measure with: longtrain bench suite={spec.cost.suite}")
    if spec.data is None and data_config(cfg).asks_target:
        lines.append(
            "data.answers=target: the target's answers are written first, by prepare, and are not in the "
            "estimate."
        )
    return lines, values


def _longest_step(plan: RecipePlan) -> str:
    """Where a decoding step's time goes at the target's longest context, at best."""
    longest, gpu = plan.info.max_positions, plan.gpu
    width = roofline.Width(8 * plan.itemsize, 8 * plan.itemsize)
    found = roofline.figures(roofline.step(plan.size, batch=1, context=longest, width=width), gpu)
    return (
        f"a step at {longest} tokens takes {found['ms']:.3g} ms or more on an {gpu.name}, "
        f"{found['attention_share']:.0%} of it attention ({found['aggregate_intensity']:.3g} FLOP a byte, "
        f"{found['aggregate_bound']} bound)"
    )
