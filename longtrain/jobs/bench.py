"""`longtrain bench`: measure speed or memory on this machine, write JSON, show a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.console import Console

from longtrain import provenance
from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.contexts import documents_from_files, parse_tokens
from longtrain.jobs import convert, device_of, load_target_from, plain, sampling_from, shape_from

if TYPE_CHECKING:
    from longtrain.target.model import Target

SUITES = ("engine", "draft_memory", "eviction")


def run(cfg: DictConfig) -> None:
    """Run the suite that `suite.name` names.

    Raises:
        ConfigError: no such suite, or one of its keys is wrong.
    """
    from longtrain.bench import draft_memory, engine, report

    name = str(cfg.suite.name)
    if name not in SUITES:
        raise ConfigError(f"bench has no suite '{name}'; known: {', '.join(SUITES)}")
    if name == "eviction":
        _eviction(cfg)
        return
    rows = _engine(cfg) if name == "engine" else _draft_memory(cfg)
    folder = Path(cfg.run_dir) / "bench"
    path = report.write(folder, name, settings=plain(cfg.suite), rows=rows)
    provenance.write(folder, plain(cfg))
    columns = engine.COLUMNS if name == "engine" else draft_memory.COLUMNS
    console = Console(soft_wrap=True, highlight=False)
    console.print(report.table(rows, columns), markup=False)
    console.print(f"wrote {path}", markup=False)


def _engine(cfg: DictConfig) -> list[dict[str, Any]]:
    """Plain against speculative decoding on the held-out text that ships with the package."""
    from longtrain.artifact import Artifact
    from longtrain.bench import engine

    artifact = Artifact.load(cfg.artifact, home=cfg.home) if cfg.artifact else None
    target = load_target_from(cfg, path=artifact.target.name if artifact else None)
    settings = engine.Settings(
        max_new_tokens=int(cfg.suite.max_new_tokens),
        sampling=sampling_from(cfg),
        shape=shape_from(cfg),
        warmup=int(cfg.suite.warmup),
        repeats=int(cfg.suite.repeats),
    )
    rows: list[dict[str, Any]] = []
    for length in map(parse_tokens, cfg.suite.lengths):
        for batch in cfg.suite.batches:
            parts = artifact.attach(target, verify=not rows) if artifact else None
            rows.append(engine.measure(target, parts, _prompts(target, length, batch), settings))
    return rows


def _prompts(target: Target, length: int, batch: int) -> list[list[int]]:
    """Stretches of held-out text, evenly spread.

    Raises:
        DataError: the target has no tokenizer, or there is too little text for this length.
    """
    if target.tokenizer is None:
        raise DataError(f"target {target.info.name} has no tokenizer; bench suite=engine needs real text")
    documents = documents_from_files(asset_dir("bundled") / "text" / "heldout", target.tokenizer)
    ids = [int(token) for document in documents for token in document.ids_T]
    if len(ids) < length:
        raise DataError(f"held-out text has {len(ids)} tokens; lengths={length} asks for more")
    step = (len(ids) - length) // max(1, batch - 1) if batch > 1 else 0
    return [ids[i * step : i * step + length] for i in range(batch)]


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
        provenance.replace_text(folder / "eviction.md", text)
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
