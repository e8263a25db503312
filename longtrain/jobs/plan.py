"""`longtrain plan`: estimates of a recipe's memory and time from shapes only: no weights, no downloads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import files, provenance
from longtrain.costs import decoding, elastic, hardware, ranks, roofline, training
from longtrain.costs.decoding import Served
from longtrain.costs.hardware import GIB
from longtrain.costs.model import window_slots
from longtrain.data.config import NO_STAGES
from longtrain.errors import ConfigError
from longtrain.jobs.planning import advice as plan_advice
from longtrain.jobs.planning import training as plan_training
from longtrain.jobs.planning.run_plan import RunPlan
from longtrain.jobs.planning.target_shape import config_file, target_shape
from longtrain.methods.named import named
from longtrain.settings import read
from longtrain.tables import of_rows, print_lines

if TYPE_CHECKING:
    from longtrain.cache.entry_sets import ReadBudget
    from longtrain.config import RunConfig
    from longtrain.costs.method import CycleCost
    from longtrain.costs.model import Sizes
    from longtrain.methods.spec import MethodSpec

PASSES = (1, 2, 4, 8, 16, 64)
"""Tokens of a pass, such as a root with the drafted tokens that are verified, in the line on experts."""
CHAIN = (1, 1, 1, 1)
"""Drafted tokens of a cycle if `decode.shape` names no chain."""


def run(cfg: RunConfig) -> None:
    """Print the cost of decoding at some contexts, or with data the estimates of each training stage.

    Raises:
        ConfigError: there is no target or stage, or the target's shape is not available.
    """
    check(cfg)
    plan, spec = RunPlan(cfg), None if cfg.method is None else cfg.method.spec
    if spec is None or spec.objective is None or not cfg.data_values:
        if cfg.plan.json:
            raise ConfigError("json=FILE is written for a recipe that trains; leave it out for decoding")
        print_lines(*facts(plan), *_decoding(plan))
        return
    if cfg.cache is not None:
        raise ConfigError(
            f"cache={cfg.cache}: of a recipe that trains, training is planned; for decoding with a cache "
            "pass target=NAME method=NAME and no recipe"
        )
    lines, values = _training(plan)
    print_lines(*facts(plan), *lines)
    if cfg.plan.json:
        path = Path(cfg.plan.json).expanduser()
        files.write_files(path.parent, {path.name: files.as_json(values)})
        print_lines(f"written   {path}")


def check(cfg: RunConfig) -> None:
    """Refuse values that cannot be planned; loads nothing.

    Raises:
        ConfigError: there is no target, its shape is not available, or a value of the plan's own keys is
            wrong.
    """
    if not cfg.values.get("target"):
        raise ConfigError(
            "plan needs a recipe; pass +recipe=NAME (longtrain recipes lists them), or for decoding alone "
            "target=NAME, with a method if needed"
        )
    hardware.named(cfg.plan.gpu, "gpu")
    target_shape(cfg.target, served=cfg.features.mode != "engine")


def facts(plan: RunPlan) -> list[str]:
    """Lines about the target: size, KV cache per token."""
    kv = training.kv_bytes_per_token(plan.size, itemsize=plan.itemsize)
    billions = plan.weight_bytes / plan.itemsize / 1e9
    shape = "" if config_file(plan.info.name) else " (by target.shape: no config.json of it is here)"
    given = plan.cfg.target.shape
    name = plan.info.name or (given if isinstance(given, str) else "of the given shape")
    near = []
    if windows := [window for window in plan.info.windows if window]:
        slots, layers, most = window_slots(max(windows)), plan.info.n_layers, plan.info.max_positions
        held = most * layers - len(windows) * max(0, most - slots)
        near.append(
            f"windows   {len(windows)} of {plan.info.n_layers} layers see the last {max(windows)} tokens; "
            f"they store {slots} entries, and all layers then {kv / layers * held / GIB:.3g} GiB; a method's "
            "own cache and its training are estimated as if all layers saw the whole text"
        )
    return [
        f"target    {name}: {billions:.3g} B weights, {plan.weight_bytes / GIB:.3g} GiB{shape}",
        f"KV cache  {kv / 1024:.4g} KiB a token; {kv * plan.info.max_positions / GIB:.3g} GiB at its "
        f"{plan.info.max_positions} positions",
        *near,
        *_experts(plan.size),
    ]


def _experts(size: Sizes) -> list[str]:
    """A line on what passes over some tokens read of the experts; nothing without experts."""
    if (have := size.experts) is None:
        return []
    read = ", ".join(
        f"{tokens}: {have.read(tokens):.3g} (x{size.read(tokens) / size.read(1):.2g})" for tokens in PASSES
    )
    return [
        f"experts   {have.count} in a layer, {have.per_token} a token, which goes through "
        f"{size.used / 1e9:.3g} B of the layers' weights",
        "          expected experts of a layer that a pass over some tokens reads (and the weights of "
        f"all layers, over those that one token reads): {read}",
    ]


def _decoding(plan: RunPlan) -> list[str]:
    """Tables of plain decoding and, if the method's cycle cost is known, of the method's cycles."""
    cfg, gpu, batch = plan.cfg, plan.gpu, plan.cfg.plan.batch
    acceptance, contexts = cfg.plan.acceptance, sorted(set(cfg.plan.contexts))
    within = [context for context in contexts if context <= plan.info.max_positions]
    if not within:
        raise ConfigError(
            f"contexts={cfg.values['contexts']}; allowed: 1 to the target's {plan.info.max_positions} "
            "positions"
        )
    served = Served(plan.size, gpu, batch, plan.itemsize, plan.weight_bytes, plan.info.windows)
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
        widths = _chain(cfg.decode.shape)
        if plan.spec.objective is not None:
            _ = plan.trained  # raises if the module cannot be built
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
    """A description of the table of a method's cycles."""
    if chosen:
        return (
            f"{cost.title}: expected times; {chosen} entries read a step (evict.budget_tokens), chosen by "
            "scores of all."
        )
    if cost.draft:
        return (
            f"{cost.title}: expected times; {drafted} drafted tokens a cycle, each accepted with probability "
            f"{acceptance:g} (acceptance=); speed is over plain decoding on the plain cache."
        )
    return f"The cache of {cost.title} without its draft: expected times."


def _not_in_the_table(spec: MethodSpec) -> str:
    """Advice for a method whose steps cannot be estimated."""
    left_out = f"The table leaves method={spec.name} out: the cost of its steps cannot be estimated."
    if spec.attach is None:
        return f"{left_out} For its training pass +recipe=NAME (longtrain recipes lists them)."
    bench = f"longtrain bench suite=engine method={spec.name}"
    if spec.objective is None:
        return f"{left_out} Measure them: {bench}"
    return (
        f"{left_out} Measure them: {bench} artifact=NAME; for its training pass +recipe=NAME (longtrain "
        "recipes lists them)."
    )


def _budget(plan: RunPlan) -> ReadBudget:
    """The number of entries that a step reads with a selector."""
    from longtrain.methods.read_budget import read_budget

    keys = {"budget_tokens": plan.cfg.evict.budget_tokens, **plan.cfg.select}
    found = read_budget("plan", keys)
    if found.dense_layers:
        raise ConfigError(
            f"select.dense_layers={list(found.dense_layers)}; plan counts steps in which every layer "
            "chooses; leave it out"
        )
    return found


def _elastic(plan: RunPlan, served: Served, steps: list[dict[str, Any]]) -> list[str]:
    """With `cache=elastic`, a table of offloading thresholds and one of steps with a selector; otherwise
    nothing.

    Args:
        plan: the run's plan.
        served: the target on a GPU.
        steps: table lines of steps with a selector and all entries on the device; empty: no selector.
    """
    if (wanted := named("cache", plan.cfg.cache, "plan")) is None:
        return []
    if wanted.name != "elastic":
        raise ConfigError(f"cache={wanted.name}; plan knows: elastic, or null")
    if plan.spec is not None and not steps:
        raise ConfigError(
            f"cache=elastic with method={plan.spec.name}: such steps cannot be estimated, if there are "
            "any (entries must be chosen before the layers run); leave method out for the thresholds alone"
        )
    from longtrain.cache.elastic import Offloading

    offloading = read(Offloading, wanted.options, "cache elastic")
    batch, size, budget = served.batch, plan.size, _budget(plan)
    chosen = budget.rows
    memory = elastic.ElasticMemory(
        size.n_layers,
        size.n_kv_heads,
        size.head_dim,
        batch,
        plan.itemsize,
        slots=chosen + 2 * budget.every - 1,  # the same as `ElasticCache.reserve` without a draft
        page_entries=offloading.page_entries,
    )
    longest, cap = plan.info.max_positions, offloading.memory_gib
    about = f"Elastic cache of {batch} sequence{'s' if batch > 1 else ''}, {chosen} entries read a step"
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


def _chain(shape: str | Sequence[int]) -> tuple[int, ...]:
    """The chain named by `decode.shape`, or the default chain."""
    is_chain = bool(shape) and all(width == 1 for width in shape)
    return (1,) * len(shape) if is_chain else CHAIN


def _training(plan: RunPlan) -> tuple[list[str], dict[str, Any]]:
    """Lines on training (memory, a table of the stages, what fits, disk), and the same as JSON values."""
    cfg, spec, layout = plan.cfg, plan.trained_method, plan.layout
    if not cfg.stages:
        raise ConfigError(NO_STAGES)
    rows = plan_training.stages_of(plan)
    left, memory = plan_training.disk_of(plan), plan_advice.most(rows)
    lines = [
        f"decoding  {_longest_step(plan)}",
        f"trained   {plan.trained / 1e6:.4g} M weights",
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
        "method": {"name": spec.name, **asdict(plan.config), "trained": plan.trained},
        "layout": asdict(layout),
        "stages": rows,
        "disk_bytes": left,
        "assumptions": ranks.assumptions(plan.gpu, layout),
    }
    if plan.on_cpu:
        lines.append("No times are estimated for trainer.accelerator=cpu, nor what fits.")
    else:
        verdict, advised = plan_advice.verdict(plan, rows)
        lines += [*verdict, plan_training.duration(plan, rows)]
        values["advice"] = advised
    lines.append(f"All numbers are estimates; measure with: longtrain bench suite={spec.cost.suite}")
    if spec.data is None and cfg.data.asks_target:
        lines.append(
            "data.answers=target: the target's answers are written first, by prepare, and are not in the "
            "estimate."
        )
    return lines, values


def _longest_step(plan: RunPlan) -> str:
    """A roofline estimate of a decoding step at the target's longest context."""
    longest, gpu = plan.info.max_positions, plan.gpu
    width = roofline.Width(8 * plan.itemsize, 8 * plan.itemsize)
    found = roofline.metrics(roofline.step(plan.size, batch=1, context=longest, width=width), gpu)
    return (
        f"a step at {longest} tokens takes {found['ms']:.3g} ms or more on an {gpu.name}, "
        f"{found['attention_share']:.0%} of it attention ({found['aggregate_intensity']:.3g} FLOP a byte, "
        f"{found['aggregate_bound']} bound)"
    )
