"""`longtrain bench`: measure speed or memory on this machine, write JSON and pictures, show a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain import files, provenance
from longtrain.jobs.setup import convert, device_of, drafting_from, load_target_from, plain, sampling_from
from longtrain.log import get_logger
from longtrain.settings import parse_tokens
from longtrain.tables import say

if TYPE_CHECKING:
    from longtrain.bench.suites import Bench, Context

log = get_logger(__name__)


def run(cfg: DictConfig) -> None:
    """Run the suite that `suite.name` names; what was measured before a fault is kept and shown.

    Raises:
        ConfigError: no such suite, or one of its keys is wrong.
    """
    from longtrain.bench.suites import SUITES, bench_of, brief

    name = str(cfg.suite.name)
    if name not in SUITES and _former(cfg, name):
        return
    bench, context = bench_of(name), context_of(cfg)
    settings = bench.read(plain(cfg.suite), context)
    folder = Path(cfg.run_dir) / "bench"
    rows: list[dict[str, Any]] = []
    try:
        for row in bench.run(settings, context):
            if not rows:  # what was refused leaves the last run's files alone
                provenance.write(folder, plain(cfg))
            rows.append(row)
            _write(folder, name, plain(cfg.suite[bench.group] if bench.group else cfg.suite), rows)
            log.info("suite=%s %s", name, brief(row))
    finally:
        if rows:
            _show(bench, settings, context, folder, name, rows)


def context_of(cfg: DictConfig) -> Context:
    """What suites may know of the configuration beside their own keys."""
    import torch

    from longtrain.bench.suites import Context

    return Context(
        device=torch.device(device_of(cfg)),
        seed=convert(cfg.seed, int, "seed"),
        dtype=str(cfg.target.dtype) if cfg.target else "auto",
        method=plain(cfg.method) if cfg.method else None,
        artifact=str(cfg.artifact) if cfg.artifact else None,
        home=Path(cfg.home),
        sampling=sampling_from(cfg),
        drafting=lambda: drafting_from(cfg),
        load_target=lambda path: load_target_from(cfg, path=path),
    )


def _write(folder: Path, name: str, keys: Any, rows: list[dict[str, Any]]) -> None:
    """Write `NAME.json`: the suite's keys as they were given, the environment and the measurements."""
    content = {"suite": name, "settings": keys, **provenance.gather(), "rows": rows}
    files.write_text(folder / f"{name}.json", json.dumps(content, indent=2) + "\n")


def _show(
    bench: Bench, settings: Any, context: Context, folder: Path, name: str, rows: list[dict[str, Any]]
) -> None:
    """Print the table, and write it and the pictures beside the JSON."""
    text = bench.table(rows, settings, context)
    pictures = bench.pictures(rows) if bench.pictures else {}
    files.write_files(folder, {f"{name}.md": f"{text}\n".encode(), **pictures})
    say(text, f"wrote {', '.join([f'{name}.json', f'{name}.md', *pictures])} in {folder}")


def _former(cfg: DictConfig, name: str) -> bool:
    """Run a suite that has no entry in `bench.suites` yet; whether there is one."""
    import importlib

    if name in ("engine", "draft_memory"):
        _of_rows(cfg, name)
    elif name == "eviction":
        _eviction(cfg)
    elif name in ("kernels", "linears", "quantise", "quantspec"):
        importlib.import_module(f"longtrain.jobs.bench_{name}").run(cfg)
    elif name == "quantspec_quality":
        importlib.import_module("longtrain.jobs.bench_quality").run(cfg)
    else:
        return False
    return True


def _of_rows(cfg: DictConfig, name: str) -> None:
    from rich.console import Console

    from longtrain.bench import draft_memory, engine, report
    from longtrain.jobs import bench_engine

    engines = name == "engine"
    rows = bench_engine.engine_rows(cfg) if engines else _draft_memory(cfg)
    folder = Path(cfg.run_dir) / "bench"
    path = report.write(folder, name, settings=plain(cfg.suite), rows=rows)
    provenance.write(folder, plain(cfg))
    console = Console(soft_wrap=True, highlight=False)
    console.print(report.table(rows, engine.COLUMNS if engines else draft_memory.COLUMNS), markup=False)
    if cycles := [one for row in rows for one in row.get("steps", [])]:
        console.print(report.table(cycles, engine.STEP_COLUMNS), markup=False)
    console.print(f"wrote {path}", markup=False)


def _draft_memory(cfg: DictConfig) -> list[dict[str, Any]]:
    """A LongSpec training step on a random target."""
    from longtrain.bench import draft_memory

    device, suite = device_of(cfg), cfg.suite
    cuda = device.startswith("cuda")
    method = plain(cfg.method) if cfg.method else {}
    method.pop("name", None)
    settings = draft_memory.Settings(
        shape=("llama31_8b" if cuda else "llama_micro") if suite.shape == "auto" else suite.shape,
        dtype=("bfloat16" if cuda else "float32") if suite.dtype == "auto" else suite.dtype,
        device=device,
        lengths=tuple(sorted(map(parse_tokens, suite.lengths))),
        method={**method, "chunk_tokens": int(suite.chunk_tokens)},
        warmup=int(suite.warmup),
        repeats=int(suite.repeats),
        seed=int(cfg.seed),
    )
    return draft_memory.measure(settings)


def _eviction(cfg: DictConfig) -> None:
    """Time to first token, training step and kernels; files are written again whenever there is a new row."""
    from longtrain.bench import eviction, eviction_report, report

    settings = eviction_settings(cfg)
    settings.check()
    folder = Path(cfg.run_dir) / "bench"
    provenance.write(folder, plain(cfg))
    keys = plain(cfg.suite.cost)
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)

    def keep(rows: list[dict[str, Any]]) -> None:
        report.write(folder, "eviction", settings=keys, rows=rows)

    rows: list[dict[str, Any]] = []
    try:
        eviction.measure(settings, rows, keep)
    finally:  # what was measured before a fault is shown too
        text = eviction_report.markdown(rows, shape=settings.shape, device=_device_name(settings.device))
        files.write_text(folder / "eviction.md", text)
        written = ["eviction.json", "eviction.md"]
        if (png := eviction_report.picture(rows)) is not None:
            (folder / "eviction.png").write_bytes(png)
            written.append("eviction.png")
        console.print(text, markup=False)
        console.print(f"wrote {', '.join(written)} in {folder}", markup=False)


def eviction_settings(cfg: DictConfig) -> Any:
    """`suite.cost` as the settings of `bench.eviction`; `auto` is settled by the device.

    Raises:
        ConfigError: a value of another type.
    """
    from longtrain.bench import eviction, eviction_train, eviction_ttft

    device, cost = device_of(cfg), plain(cfg.suite.cost)
    cuda = device.startswith("cuda")

    def auto(key: str, on_cuda: Any, elsewhere: Any) -> Any:
        return (on_cuda if cuda else elsewhere) if cost[key] == "auto" else cost[key]

    def tokens(values: Any) -> tuple[int, ...]:
        return tuple(map(parse_tokens, values))

    times = {"warmup": int, "repeats": int, "min_repeats": int, "seconds": float}
    warmup, repeats, least, seconds = (
        convert(cost[key], kind, f"suite.cost.{key}") for key, kind in times.items()
    )
    seed = convert(cfg.seed, int, "seed")
    method = plain(cfg.method) if cfg.method else {}
    own = method.pop("name", None) == "lookaheadkv"
    options = {"lookaheadkv": method} if own else {}
    cells = auto("kernels", [[32, "8k"], [32, "32k"], [32, "128k"], [512, "16k"]], [[8, 256], [32, 512]])
    return eviction.Settings(
        shape=str(auto("shape", "llama31_8b", "llama_micro")),
        draft_shape=str(auto("draft_shape", "llama32_1b", "llama_micro")),
        dtype=str(auto("dtype", "bfloat16", "float32")),
        device=device,
        ttft=eviction_ttft.Settings(
            lengths=tokens(auto("lengths", ["4k", "8k", "16k", "32k"], [256, "1k"])),
            methods=tuple(convert(cost["methods"], list[str], "suite.cost.methods")),
            budget=convert(cost["budget_tokens"], int, "suite.cost.budget_tokens"),
            warmup=warmup,
            repeats=repeats,
            least=least,
            seconds=seconds,
            seed=seed,
        ),
        training=eviction_train.Settings(
            prompts=tokens(auto("train_prompts", ["16k", "32k"], [256])),
            response=parse_tokens(auto("train_response", 512, 64)),
            method=options.get("lookaheadkv", {}),
            warmup=warmup,
            repeats=repeats,
            least=least,
            seconds=convert(cost["train_seconds"], float, "suite.cost.train_seconds"),
            seed=seed,
        ),
        kernels=tuple((parse_tokens(rows), parse_tokens(keys)) for rows, keys in cells),
        kernel_repeats=convert(cost["kernel_repeats"], int, "suite.cost.kernel_repeats"),
        theory_lengths=tokens(cost["theory_lengths"]),
        gpus=tuple(convert(cost["gpus"], list[str], "suite.cost.gpus")),
        sections=tuple(convert(cost["sections"], list[str], "suite.cost.sections")),
        options=options,
    )


def _device_name(device: str) -> str:
    """What CUDA calls it, or `CPU`."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
