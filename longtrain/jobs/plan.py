"""`longtrain plan`: what a recipe will need, from shapes alone: no weights, no downloads."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console

from longtrain import methods
from longtrain.assets import asset_dir
from longtrain.bench.report import GIB, table
from longtrain.costs import roofline
from longtrain.costs import training as estimate
from longtrain.costs.hardware import Gpu
from longtrain.costs.model import Sizes
from longtrain.errors import ConfigError
from longtrain.jobs.plan_decoding import gpu_of, told
from longtrain.jobs.prepare import data_config
from longtrain.jobs.setup import plain, typed
from longtrain.methods.quantspec.config import Config as QuantSpec
from longtrain.targets.info import TargetInfo

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}


def run(cfg: DictConfig) -> None:
    """Print what decoding takes at some contexts, or the estimates of each stage's rows where data are given.

    Raises:
        ConfigError: a method that is trained and no data, no stages, or the target's shape is not at hand.
    """
    spec = methods.get(cfg.method.name) if cfg.method else None
    if not cfg.target or (spec is not None and spec.objective is not None and not cfg.data):
        raise ConfigError(
            "plan needs a recipe; pass +recipe=NAME (longtrain recipes lists them), or for decoding alone "
            "target=NAME, with method=quantspec say"
        )
    info, tied = _target(cfg)
    config = typed(spec.config, plain(cfg.method), "method", ignore=("name",)) if spec else None
    console = Console(soft_wrap=True, highlight=False)
    size = ITEMSIZE.get(str(cfg.target.dtype), 2)
    parameters = estimate.target_parameters(Sizes.of(info), tied=tied)
    kv = estimate.kv_bytes_per_token(Sizes.of(info), itemsize=size)
    facts = [
        ("target", f"{info.name}: {parameters / 1e9:.3g} B weights, {parameters * size / GIB:.3g} GiB"),
        ("KV cache", f"{kv / 1024:.4g} KiB a token; {kv * info.max_positions / GIB:.3g} GiB at its "
                     f"{info.max_positions} positions"),
    ]  # fmt: skip
    if spec is None or spec.objective is None or not cfg.data:
        lines = [f"{name:<10}{text}" for name, text in facts]
        quantspec = config if isinstance(config, QuantSpec) else None
        lines += told(cfg, info, quantspec, itemsize=size, weight_bytes=parameters * size)
        lines.append(
            "Estimates by arithmetic; measure with: longtrain bench suite=engine, or suite=quantspec"
        )
        console.print("\n".join(lines), markup=False)
        return
    with torch.device("meta"):
        trained = sum(p.numel() for p in spec.build(config, info).parameters() if p.requires_grad)
    facts += [
        ("decoding", _decoding(info, size, gpu_of(cfg))),
        ("trained", f"{trained / 1e6:.4g} M weights; {trained * estimate.STATE_BYTES / GIB:.3g} GiB with "
                    "gradients and Adam"),
    ]  # fmt: skip
    console.print("\n".join(f"{name:<10}{text}" for name, text in facts), markup=False)
    rows = [
        _stage(cfg, info, stage, config, trained=trained, fixed=parameters * size)
        for stage in cfg.data.stages
    ]
    if not rows:
        raise ConfigError("data.stages is empty; a recipe says how its rows are packed")
    columns = {
        "row tokens": "row_tokens", "document": "doc_tokens", "chunk": "chunk", "inputs GiB": "inputs",
        "target pass GiB": "target_pass", "module GiB": "module", "peak GiB": "peak",
        "PFLOP a row": "pflop", "tokens/s": "tokens_per_s", "s a step": "step_s", "steps": "steps",
        "hours": "hours",
    }  # fmt: skip
    console.print(table(rows, columns), markup=False)
    times = (
        "No times are estimated for trainer.accelerator=cpu."
        if _on_cpu(cfg)
        else f"Times assume {cfg.gpu_tflops:g} TFLOP/s on each of {cfg.devices} device(s)."
    )
    console.print(
        f"{times} All figures are estimates; measure with: longtrain bench suite={_suite(config)}",
        markup=False,
    )
    if spec.data is None and data_config(cfg).asks_target:
        console.print(
            "data.answers=target: the target's answers are written first, by prepare, and are not in the "
            "estimate.",
            markup=False,
        )


def _decoding(info: TargetInfo, itemsize: int, gpu: Gpu) -> str:
    """Where a decoding step's time goes at the target's longest context, at best."""
    width = roofline.Width(8 * itemsize, 8 * itemsize)
    parts = roofline.step(Sizes.of(info), batch=1, context=info.max_positions, width=width)
    found = roofline.figures(parts, gpu)
    return (
        f"a step at {info.max_positions} tokens takes {found['ms']:.3g} ms or more on an {gpu.name}, "
        f"{found['attention_share']:.0%} of it attention ({found['aggregate_intensity']:.3g} FLOP a byte, "
        f"{found['aggregate_bound']} bound)"
    )


def _on_cpu(cfg: DictConfig) -> bool:
    """Whether the run is on a processor, of whose speed nothing is known here."""
    return str(cfg.trainer.get("accelerator")) == "cpu"


def _suite(config: Any) -> str:
    """The suite of `bench` that measures what is planned here."""
    return "eviction" if hasattr(config, "n_lookahead") else "draft_memory"


def _stage(
    cfg: DictConfig, info: TargetInfo, stage: DictConfig, config: Any, *, trained: int, fixed: int
) -> dict[str, Any]:
    """One line of the table."""
    item = ITEMSIZE.get(str(cfg.target.dtype), 2)
    size = Sizes.of(info)
    row = estimate.PackedRow(stage.row_tokens, stage.doc_tokens, getattr(config, "chunk_tokens", 0))
    target_pass = estimate.target_pass_bytes(size, row, itemsize=item)
    flops = estimate.target_flops(size, row)
    if rows := getattr(config, "n_lookahead", 0):
        inputs = estimate.suffix_input_bytes(size, row, itemsize=item)
        module = estimate.suffix_bytes(size, row, rows=rows, itemsize=item)
        flops += estimate.suffix_flops(size, row, rows=rows, response=int(cfg.data.get("answer_tokens") or 0))
    else:
        hidden = getattr(config, "objective", "kl") == "kl"
        inputs = estimate.input_bytes(size, row, itemsize=item, hidden=hidden)
        module = estimate.draft_chunk_bytes(size, row, itemsize=item)
        window = getattr(config, "window", row.doc_tokens)
        flops += estimate.draft_flops(size, row, trained=trained, window=window)
    seconds = flops / (cfg.gpu_tflops * 1e12)
    devices = int(cfg.devices)
    asked = cfg.trainer.get("rows_per_step")  # of all devices; else each has its own
    all_rows = int(asked) if asked else int(cfg.trainer.accumulate_grad_batches) * devices
    steps, rows_per_step = _steps(cfg, stage, all_rows), all_rows / devices
    step_s = None if _on_cpu(cfg) else seconds * rows_per_step
    return {
        "row_tokens": row.tokens,
        "doc_tokens": row.doc_tokens,
        "chunk": row.chunk,
        "inputs": inputs / GIB,
        "target_pass": target_pass / GIB,
        "module": module / GIB,
        "peak": (fixed + trained * estimate.STATE_BYTES + inputs + max(target_pass, module)) / GIB,
        "pflop": flops / 1e15,
        "tokens_per_s": None if step_s is None else row.tokens / seconds * devices,
        "step_s": step_s,
        "steps": steps,
        "hours": None if steps is None or step_s is None else steps * step_s / 3600,
    }


def _steps(cfg: DictConfig, stage: DictConfig, rows: int) -> int | None:
    """Optimizer steps of a stage; None where they depend on data that is not prepared yet."""
    total = cfg.trainer.get("max_steps")
    if stage.get("steps"):
        return int(stage.steps)
    if stage.get("fraction") and total:
        return round(stage.fraction * total)
    folders = f"{glob.escape(str(cfg.data.name))}-{'[0-9a-f]' * 8}"  # one for each tokenizer
    manifests = (Path(cfg.home) / "data").glob(f"{folders}/manifest.json")
    newest = max(manifests, key=lambda path: path.stat().st_mtime, default=None)
    if not stage.get("epochs") or newest is None:
        return None
    counts = json.loads(newest.read_text(encoding="utf-8"))["counts"]
    return int(stage.epochs * (counts["tokens"] - counts["val_tokens"]) / (stage.row_tokens * rows))


def _target(cfg: DictConfig) -> tuple[TargetInfo, bool]:
    """The target's shape, and whether its head is its embedding: from config.json, else from `target.shape`.

    Raises:
        ConfigError: neither is there.
    """
    where = str(cfg.target.path or "")
    folder = asset_dir("bundled") / "tiny" if where == "tiny" else Path(where).expanduser()
    if where and (folder / "config.json").is_file():
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = raw["num_attention_heads"]
        shape = {
            "n_layers": raw["num_hidden_layers"],
            "n_heads": heads,
            "n_kv_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
            "hidden_size": raw["hidden_size"],
            "intermediate_size": raw["intermediate_size"],
            "vocab_size": raw["vocab_size"],
            "max_positions": cfg.target.get("max_positions") or raw["max_position_embeddings"],
            "tied": raw.get("tie_word_embeddings", False),
        }
    elif cfg.target.shape:
        shape = plain(cfg.target.shape)
    else:
        raise ConfigError(
            f"plan cannot know the shape of target.path={where or 'null'}: no config.json there and no "
            "target.shape; pass +recipe=NAME, target=NAME or target.path=FOLDER"
        )
    tied = bool(shape.pop("tied", False))
    shape |= {"family": "", "rms_norm_eps": 1e-6, "rope": {}, "qk_norm": False, "attention_bias": False}
    return TargetInfo(name=where, **shape), tied
