"""`longtrain bench suite=quantspec`: what to measure, from the configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig
from rich.console import Console

from longtrain import methods, provenance
from longtrain.assets import asset_dir
from longtrain.bench import quantspec_accept as accept
from longtrain.bench import quantspec_report, quantspec_shape, quantspec_text, report
from longtrain.bench.graphs import read_bytes_per_s
from longtrain.bench.quantspec_cells import FULL, INT8, Cell, Group, Settings, Way
from longtrain.costs.cycle import Forward, longspec
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError
from longtrain.evaluation.contexts import choose_points, documents_from_files, prefix_of
from longtrain.jobs import bench_rows
from longtrain.jobs.setup import (
    at_least,
    convert,
    device_of,
    load_target_from,
    plain,
    sampling_from,
    shape_from,
    typed,
)
from longtrain.kernels.tree_attention import MAX_NODES
from longtrain.log import get_logger
from longtrain.targets.loading import random_target

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

Rows = list[dict[str, Any]]
RECORDED = "results/longspec_small/main.scores.json"
"""Of `recipes`: what a trained draft had accepted."""
SELF = {"method": "quantspec"}
HALVES = [
    {"method": {"name": "quantspec", "weight_bits": 16}, "label": "quantspec, KV only"},
    {"method": {"name": "quantspec", "kv_bits": 8}, "label": "quantspec, weights only"},
]
SPARSE: list[Mapping[str, Any]] = [
    {"method": {"name": "magicdec", "policy": "streaming_llm"}, "label": "StreamingLLM draft"},
    {"method": {"name": "magicdec", "policy": "snapkv"}, "label": "SnapKV draft"},
    {"method": "prompt_lookup", "label": "prompt look-up"},
]
KEYS = {"method", "label", "drafted", "acceptance"}
DRAFTED, SPARSE_DRAFTED, MIDDLE = [1, 2, 3, 4, 6], [1, 2, 3], 3
"""QuantSpec Fig. 9 and Table 6: sparse drafts are best at few. The step model is best at 3."""


@dataclass(frozen=True)
class Asked:
    """An entry of `suite.systems`.

    Args:
        name: unique.
        method: its name.
        config: its settings.
        drafted: tokens a cycle.
        acceptance: chance of a drafted token, where it is given.
    """

    name: str
    method: str
    config: Any
    drafted: tuple[int, ...]
    acceptance: float

    def attach(self, target: Target) -> Parts:
        """Draft and cache for a target."""
        spec = methods.get(self.method)
        assert spec.attach is not None
        return spec.attach(spec.build(self.config, target.info), target, self.config, {})

    def undrafted(self) -> Asked:
        """QuantSpec's cache alone, so that no weights of a draft are there when it decodes plainly."""
        return replace(self, config=replace(self.config, draft=False))


def run(cfg: DictConfig) -> None:
    """Measure, write `quantspec.json` (again whenever there is a new row) and pictures, show tables.

    Raises:
        ConfigError: a key of the suite is wrong.
        DataError: there is no text, or no recorded run, of that kind.
    """
    folder = Path(cfg.run_dir) / "bench"
    device = torch.device(device_of(cfg))
    _cap(cfg, device)

    def keep(rows: Rows) -> None:
        if len(rows) == 1:  # what was refused leaves the last run's files alone
            provenance.write(folder, plain(cfg))
        report.write(folder, "quantspec", settings=plain(cfg.suite), rows=rows)

    console = Console(soft_wrap=True, highlight=False)
    if cfg.suite.shape is None:
        rows = _text(cfg, device, keep)
        tables = [report.table(rows, quantspec_report.TEXT_COLUMNS)]
        pictures = quantspec_report.text_pictures(rows)
    else:
        rows = _shape(cfg, device, keep)
        tables = [report.table(rows, quantspec_report.SHAPE_COLUMNS)]
        if apart := [row for row in rows if "steps" in row]:
            tables.append(report.table(apart, quantspec_report.STEP_COLUMNS))
        pictures = quantspec_report.shape_pictures(rows)
    for table in tables:
        console.print(table + "\n", markup=False)
    for name, png in pictures.items():
        (folder / name).write_bytes(png)
    console.print(f"wrote {', '.join(['quantspec.json', *pictures])} in {folder}", markup=False)


def _shape(cfg: DictConfig, device: torch.device, keep: Callable[[Rows], None]) -> Rows:
    """Given acceptance on random weights."""
    suite, seed = cfg.suite, convert(cfg.seed, int, "seed")
    shape = plain(suite.shape)
    keys = bench_rows.keys_of(shape)
    settings = Settings(
        cycles=convert(_auto(cfg, "cycles", 64, 8), int, "suite.cycles"),
        warmup=convert(suite.warmup, int, "suite.warmup"),
        fill=str(_auto(cfg, "fill", "random", "random")),
        seed=seed,
        sampling=sampling_from(cfg),
    )
    groups = _groups(cfg, device, Sizes.of_keys(keys))
    threads = at_least(suite.compile_threads, 0, "suite.compile_threads")
    dtype = str(cfg.target.dtype) if cfg.target else "auto"

    def made(keys: Any) -> Target:
        target = random_target(keys, seed=seed, dtype=dtype, device=device)
        return target.fuse() if device.type == "cuda" else target

    if device.type == "cuda":
        log.info("read_tb_per_s=%.2f", read_bytes_per_s(device) * 1e-12)
        if threads:
            log.info("compiling the kernels of %d cells", sum(len(group.cells) for group in groups))
            thin = {**keys, "num_hidden_layers": 1}
            quantspec_shape.compile_all(made(thin), groups, settings, threads=threads)
    return quantspec_shape.run(made(shape), groups, settings, keep)


def _groups(cfg: DictConfig, device: torch.device, size: Sizes) -> list[Group]:
    """The cells of a shape: plain, LongSpec as recorded, and every system as `suite.acceptance` says."""
    suite = cfg.suite
    lengths = sorted(bench_rows.lengths_of(cfg))
    batches = sorted({1, *bench_rows.batches_of(cfg)})
    split = convert(suite.split, bool, "suite.split")
    places = [(length, 1) for length in lengths] + [(lengths[0], batch) for batch in batches if batch > 1]

    def cells(way: Way) -> list[Cell]:
        return [Cell(way, n, batch, split and (n, batch) == places[0]) for n, batch in places]

    found = [Group(_nothing, tuple(cells(Way("plain", FULL, forwards=(Forward(Width()),)))))]
    recorded = _recorded(suite.recorded)
    if recorded is not None:
        for shape in accept.shapes_recorded(recorded):
            law = accept.recorded(recorded, shape, lengths[0])
            ways = cells(Way("longspec", FULL, shape, law, longspec(size, shape.widths)))
            own = tuple(cell for cell in ways if cell.context == lengths[0])
            found.append(Group(functools.partial(_longspec, seed=int(cfg.seed)), own))
    systems = _systems(cfg, device, [SELF])
    if quantised := [asked for asked in systems if asked.method == "quantspec"]:
        way = Way("plain", INT8, forwards=(Forward(Width(kv=8)),))
        found.append(Group(quantised[0].undrafted().attach, tuple(cells(way))))
    for asked in systems:
        at_batches = _at_batches(suite.batch_drafted, asked)
        mine: list[Cell] = []
        for drafted in sorted({*asked.drafted, at_batches}):
            law = accept.independent(asked.acceptance, drafted)
            cache = INT8 if asked in quantised else FULL
            way = Way(asked.name, cache, TreeShape((1,) * drafted), law, _forwards(asked, drafted))
            some = [cell for cell in cells(way) if drafted == at_batches or cell.batch == 1]
            mine += [replace(cell, split=cell.split and drafted == at_batches) for cell in some]
        mine.sort(key=lambda cell: (cell.batch, cell.context))
        found.append(Group(asked.attach, tuple(c for c in mine if c.batch == 1 or asked is systems[0])))
    return found


def _at_batches(given: Any, asked: Asked) -> int:
    """How much is drafted where batches are compared and cycles taken apart."""
    if given != "auto":
        return _drafts([at_least(given, 1, "suite.batch_drafted")], "suite.batch_drafted")[0]
    return MIDDLE if MIDDLE in asked.drafted else asked.drafted[-1]


def _nothing(target: Target) -> Parts:
    """Plain decoding."""
    return Parts()


def _longspec(target: Target, *, seed: int) -> Parts:
    """A LongSpec draft with random weights: what it costs does not depend on them."""
    spec = methods.get("longspec")
    assert spec.attach is not None
    config = spec.config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = spec.build(config, target.info)
    return spec.attach(module.to(target.device, target.dtype).eval(), target, config, {})


def _forwards(asked: Asked, drafted: int) -> tuple[Forward, ...]:
    """Of a cycle of QuantSpec; none are known of others."""
    if asked.method != "quantspec":
        return ()
    config = asked.config
    draft = Forward(Width(weights=config.weight_bits, kv=config.kv_bits), times=drafted)
    return draft, Forward(Width(kv=8), rows=drafted + 1)


def _recorded(given: Any) -> Path | None:
    """Whose accepted lengths LongSpec repeats."""
    if given is None:
        return None
    return asset_dir("recipes") / RECORDED if given == "auto" else Path(str(given)).expanduser()


def _text(cfg: DictConfig, device: torch.device, keep: Callable[[Rows], None]) -> Rows:
    """A real target on held-out text.

    Raises:
        ConfigError: a key of the suite is wrong, or the target has no tokenizer or too short a context.
        DataError: there is too little text.
    """
    new = at_least(_auto(cfg, "max_new_tokens", 90, 24), 2, "suite.max_new_tokens")
    count = at_least(_auto(cfg, "prompts", 8, 1), 1, "suite.prompts")
    lengths = sorted(bench_rows.lengths_of(cfg))
    asked = _systems(cfg, device, [SELF, *HALVES, *SPARSE])
    settings = quantspec_text.Settings(new, sampling_from(cfg), shape_from(cfg, [1]).law)
    target = load_target_from(cfg)
    if target.tokenizer is None:
        raise ConfigError(f"target {target.info.name} has no tokenizer; pass another, or suite.shape=NAME")
    if lengths[-1] + new > target.info.max_positions:
        raise ConfigError(
            f"lengths={lengths} with suite.max_new_tokens={new} exceed the context of "
            f"{target.info.max_positions} tokens of target {target.info.name}; lower one of them"
        )
    where = cfg.suite.text or asset_dir("bundled") / "text" / "heldout"
    chosen = choose_points(
        documents_from_files(where, target.tokenizer),
        longest=lengths[-1],
        count=count,
        seed=convert(cfg.seed, int, "seed"),
    )
    prefix = prefix_of(target.tokenizer)
    prompts = {length: [point.prompt(length, prefix) for point in chosen.points] for length in lengths}
    systems = [quantspec_text.System(one.name, one.attach, one.drafted) for one in asked]
    return quantspec_text.run(target, systems, prompts, settings, keep)


def _systems(cfg: DictConfig, device: torch.device, usual: Sequence[Mapping[str, Any]]) -> list[Asked]:
    """`suite.systems`.

    Raises:
        ConfigError: an entry that names no method without training, or two of one name.
    """
    given = cfg.suite.systems if cfg.suite.systems == "auto" else plain(cfg.suite.systems)
    found = [_asked(entry, cfg) for entry in (usual if given == "auto" else given)]
    names = [one.name for one in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"suite.systems has two systems named {twice[0]}; give one of them a `label`")
    return found


def _asked(entry: Any, cfg: DictConfig) -> Asked:
    if not isinstance(entry, Mapping) or "method" not in entry or set(entry) - KEYS:
        raise ConfigError(
            f"suite.systems entry {entry}; allowed: {{method: NAME}} or {{method: {{name: NAME, option: "
            "value}}, with `label`, `drafted` and `acceptance` if wanted"
        )
    method = entry["method"]
    options = dict(method) if isinstance(method, Mapping) else {"name": method}
    name = str(options.pop("name", None))
    spec = methods.get(name)
    if spec.attach is None or spec.objective is not None:
        raise ConfigError(f"suite.systems has the method {name}, which is trained; allowed: those without")
    config: Any = typed(spec.config, options, f"suite.systems: {name}")
    usual = DRAFTED if name == "quantspec" else SPARSE_DRAFTED
    drafted = entry["drafted"] if "drafted" in entry else _auto(cfg, "drafted", usual, [2])
    counts = _drafts(convert(drafted, list[int], "suite.drafted"), "suite.drafted")
    rate = convert(entry.get("acceptance", cfg.suite.acceptance), float, "suite.acceptance")
    return Asked(str(entry.get("label", name)), name, config, tuple(sorted(set(counts))), rate)


def _drafts(counts: list[int], key: str) -> list[int]:
    """Tokens drafted a cycle: with the root they are the nodes of a step."""
    if not counts or not all(1 <= count < MAX_NODES for count in counts):
        raise ConfigError(f"{key}={counts}; allowed: one or more counts, each 1 to {MAX_NODES - 1}")
    return counts


def _auto(cfg: DictConfig, key: str, on_cuda: Any, elsewhere: Any) -> Any:
    """A key of the suite; `auto` is settled by the device."""
    value = cfg.suite[key]
    if value == "auto":
        return on_cuda if device_of(cfg).startswith("cuda") else elsewhere
    return value if isinstance(value, str | int | float) else plain(value)


def _cap(cfg: DictConfig, device: torch.device) -> None:
    """Let this process have no more GPU memory than `suite.memory_gib`.

    Raises:
        ConfigError: there is no GPU, or it has less.
    """
    if cfg.suite.memory_gib is None:
        return
    most = convert(cfg.suite.memory_gib, float, "suite.memory_gib")
    if device.type != "cuda":
        raise ConfigError(f"suite.memory_gib={most:g} on a {device.type}; it caps GPU memory, pass null")
    there = torch.cuda.get_device_properties(device).total_memory / report.GIB
    if not 0 < most <= there:
        raise ConfigError(f"suite.memory_gib={most:g}; allowed: above 0, up to the {there:.0f} GiB there are")
    torch.cuda.set_per_process_memory_fraction(most / there, device)
