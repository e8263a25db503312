"""`longtrain bench`: measure speed or memory on this machine, write JSON, show a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.console import Console

from longtrain import files, provenance
from longtrain.errors import ConfigError
from longtrain.jobs.setup import convert, device_of, plain
from longtrain.settings import parse_tokens

if TYPE_CHECKING:
    pass

SUITES = (
    "engine",
    "draft_memory",
    "eviction",
    "kernels",
    "linears",
    "quantise",
    "quantspec",
    "quantspec_quality",
    "roofline",
)


def run(cfg: DictConfig) -> None:
    """Run the suite that `suite.name` names.

    Raises:
        ConfigError: no such suite, or one of its keys is wrong.
    """
    from longtrain.bench import engine, report
    from longtrain.jobs import bench_engine

    name = str(cfg.suite.name)
    if name not in SUITES:
        raise ConfigError(f"bench has no suite '{name}'; known: {', '.join(SUITES)}")
    if name == "eviction":
        _eviction(cfg)
        return
    if name == "kernels":
        from longtrain.jobs import bench_kernels

        bench_kernels.run(cfg)
        return
    if name == "linears":
        from longtrain.jobs import bench_linears

        bench_linears.run(cfg)
        return
    if name == "quantise":
        from longtrain.jobs import bench_quantise

        bench_quantise.run(cfg)
        return
    if name == "quantspec":
        from longtrain.jobs import bench_quantspec

        bench_quantspec.run(cfg)
        return
    if name == "quantspec_quality":
        from longtrain.jobs import bench_quality

        bench_quality.run(cfg)
        return
    rows, columns = _measured(cfg, name)
    folder = Path(cfg.run_dir) / "bench"
    path = report.write(folder, name, settings=plain(cfg.suite), rows=rows)
    provenance.write(folder, plain(cfg))
    console = Console(soft_wrap=True, highlight=False)
    console.print(report.table(rows, columns), markup=False)
    if cycles := [one for row in rows for one in row.get("steps", [])]:
        console.print(report.table(cycles, engine.STEP_COLUMNS), markup=False)
    about = f"{bench_engine.roofline_of(cfg)}; " if name == "roofline" else ""
    console.print(f"{about}wrote {path}", markup=False)


def _measured(cfg: DictConfig, name: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rows of a suite, and which of their values its table shows."""
    from longtrain.bench import draft_memory, engine
    from longtrain.costs import roofline
    from longtrain.jobs import bench_engine

    if name == "engine":
        return bench_engine.engine_rows(cfg), engine.COLUMNS
    if name == "roofline":
        return bench_engine.roofline_rows(cfg), roofline.COLUMNS
    return _draft_memory(cfg), draft_memory.COLUMNS


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
