"""What a recipe or a default takes of memory is fitted to what is free: packed rows, chunks and batches.

A recipe's rows were chosen for the GPU it was measured on. Where they do not fit the device at hand, rows
become shorter and a step takes more of them, so that it has as many tokens as before; fewer prompts
are decoded together. What is typed on the command line stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import methods
from longtrain.costs.held import CONTEXT, SPARE
from longtrain.costs.model import Sizes
from longtrain.costs.training import PackedRow, kv_bytes_per_token, target_parameters
from longtrain.errors import LongtrainError
from longtrain.jobs import outline
from longtrain.jobs.setup import device_of, plain
from longtrain.prompt.following import NEW_TOKENS, count, counts, typed
from longtrain.settings import read

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

    from longtrain.jobs.plan_training import TrainingPlan

CHUNK = 2048
"""Rows whose activations exist at once, where those of a whole packed row do not fit."""
ROWS = "accumulate_grad_batches"
"""Key of `trainer`: packed rows of a rank in a step."""
CACHE_COPIES = 2
"""Room for a batch's cache, in caches: the text's own, and what is copied of it while prompts are read."""


def fit_memory(cfg: DictConfig, jobs: Sequence[str], words: Sequence[str]) -> list[str]:
    """Lower rows and batches of recipes and defaults to what the free memory has room for.

    Args:
        cfg: the resolved configuration; changed in place.
        jobs: what will be done; those that hold no target are not asked.
        words: the overrides of the command line.

    Returns:
        A line that says what was changed and for how much memory, if anything was.
    """
    if set(jobs).isdisjoint(("prepare", "train", "eval")) or not (cfg.target and cfg.target.path):
        return []
    try:
        info, tied = outline.target_shape(cfg)
    except (LongtrainError, OSError, ValueError, KeyError, TypeError):
        return []  # whoever loads it says what is wrong
    said: list[str] = []
    has = None
    if "train" in jobs and (device := _trains_on(cfg)) is not None and (has := _free(device, cfg)):
        said += _fit_rows(cfg, words, has, on_gpu=device.type == "cuda", info=info, tied=tied)
    device = _torch_device(device_of(cfg))
    if (room := _free(device, cfg)) is not None:
        has = has or room
        said += _fit_batches(cfg, jobs, words, room, size=Sizes.of(info), tied=tied, device=device)
    if not said or has is None:
        return []
    return [f"fitted to {has / 2**30:.3g} GiB of free memory: {', '.join(said)}"]


def _trains_on(cfg: DictConfig) -> torch.device | None:
    """The device of training; None where nothing of the kind is here."""
    import torch

    accelerator = str(cfg.trainer.get("accelerator"))
    if accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda") if torch.cuda.is_available() else None


def _torch_device(name: str) -> torch.device:
    import torch

    return torch.device(name)


def _free(device: torch.device, cfg: DictConfig) -> float | None:
    """Bytes that a run may take; of several GPUs all that the smallest has, so that ranks find the same."""
    import torch

    if device.type != "cuda":
        from longtrain.jobs.ranks_check import host_bytes

        found = host_bytes()
        return None if found is None else found / (1 + SPARE)
    if not torch.cuda.is_available():
        return None
    if outline.devices_of(cfg) * int(cfg.trainer.get("num_nodes") or 1) > 1:
        count = torch.cuda.device_count()
        return float(min(torch.cuda.get_device_properties(i).total_memory for i in range(count)))
    return float(torch.cuda.mem_get_info(device)[0])


def _fit_rows(
    cfg: DictConfig, words: Sequence[str], has: float, *, on_gpu: bool, info: Any, tied: bool
) -> list[str]:
    """Chunks first, then shorter rows, more of them in a step."""
    if not (cfg.method and cfg.get("data") and cfg.data.get("stages")):
        return []
    if (kept := _of_earlier(cfg, words)) is not None:
        return kept
    before, chunk = [int(one.row_tokens) for one in cfg.data.stages], _chunk(cfg)
    said = []
    for change in _smaller(cfg, words):
        plan = _plan(cfg, info, tied)
        if plan is None:
            return []
        need = max(plan.memory(row, plan.given).peak for row in _rows(cfg))
        if need * (1 + SPARE) + (CONTEXT if on_gpu else 0) <= has:
            break
        change()
    if _chunk(cfg) != chunk:
        said.append(f"method.chunk_tokens {_chunk(cfg)} (was {chunk})")
    if (after := [int(one.row_tokens) for one in cfg.data.stages]) != before:
        rows = cfg.trainer[ROWS]
        said.append(f"data.stages.row_tokens {after} (was {before}), {rows} rows a step")
    return said


def _rows(cfg: DictConfig) -> list[PackedRow]:
    """A packed row of each stage, with as many documents as prompts of the usual length make."""
    answer, usual = int(cfg.data.get("answer_tokens") or 0), None
    if prompts := counts(cfg.data.get("prompt_tokens")):
        low, high = prompts[0], prompts[-1]
        usual = (low if low == high else (high - low) / math.log(high / low)) + answer
    stages = [(int(one.row_tokens), int(one.doc_tokens)) for one in cfg.data.stages]
    return [PackedRow(row, doc, answer, usual and min(usual, doc)) for row, doc in stages]


def _smaller(cfg: DictConfig, words: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Changes to make one after the other until the rows fit; the last does nothing."""
    if (
        _chunk(cfg) is not None
        and not 0 < int(_chunk(cfg) or 0) <= CHUNK
        and not typed("method.chunk_tokens", words)
    ):

        def chunked() -> None:
            cfg.method.chunk_tokens = CHUNK

        yield chunked
    keys = ("data.stages", f"trainer.{ROWS}", "trainer.rows_per_step")
    if not any(typed(key, words) for key in keys) and cfg.trainer.get("rows_per_step") is None:

        def halved() -> None:
            for stage in cfg.data.stages:
                stage.row_tokens //= 2
            cfg.trainer[ROWS] *= 2

        while all(
            one.row_tokens % 2 == 0 and one.row_tokens // 2 >= one.doc_tokens for one in cfg.data.stages
        ):
            yield halved
    yield lambda: None


def _chunk(cfg: DictConfig) -> int | None:
    """`method.chunk_tokens`; None where the method has no such key."""
    value = cfg.method.get("chunk_tokens")
    return value if isinstance(value, int) else None


def _plan(cfg: DictConfig, info: Any, tied: bool) -> TrainingPlan | None:
    """The memory of a run as it is set; None where no plan can be made of it."""
    from longtrain.jobs.plan import RecipePlan
    from longtrain.jobs.plan_training import Setting, TrainingPlan

    try:
        spec = methods.get(str(cfg.method.name))
        if spec.objective is None or spec.export is not None or spec.data is not None:
            return None
        config: Any = read(spec.config, plain(cfg.method), "method", ignore=("name",))
        nodes = int(cfg.trainer.get("num_nodes") or 1)
        layout = outline.layout_of(cfg, devices=outline.devices_of(cfg), nodes=nodes)
        return TrainingPlan(RecipePlan(cfg, info, tied, spec, config), Setting((), layout, config))
    except (LongtrainError, ValueError, TypeError):
        return None  # the checks of the job say what is wrong


def _of_earlier(cfg: DictConfig, words: Sequence[str]) -> list[str] | None:
    """Take the rows and chunks that an earlier command fitted for the run that goes on, whatever is free now.

    Returns:
        Nothing to say; None where no run goes on, or its rows were not made from these.
    """
    import yaml

    where = Path(cfg.run_dir) / "train"
    if str(cfg.get("resume", "auto")) == "never" or not any((where / "checkpoints").glob("*.ckpt")):
        return None
    try:
        kept = yaml.safe_load((where / "config.yaml").read_text(encoding="utf-8"))
        rows, accumulate = [int(one["row_tokens"]) for one in kept["data"]["stages"]], kept["trainer"][ROWS]
        chunk = kept["method"].get("chunk_tokens")
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
    now = [int(one.row_tokens) * cfg.trainer[ROWS] for one in cfg.data.stages]
    if now != [tokens * accumulate for tokens in rows]:
        return None
    if not typed("data.stages", words) and not typed(f"trainer.{ROWS}", words):
        for stage, tokens in zip(cfg.data.stages, rows, strict=True):
            stage.row_tokens = tokens
        cfg.trainer[ROWS] = accumulate
    if chunk == CHUNK and _chunk(cfg) is not None and not typed("method.chunk_tokens", words):
        cfg.method.chunk_tokens = chunk
    return []


def _fit_batches(
    cfg: DictConfig,
    jobs: Sequence[str],
    words: Sequence[str],
    has: float,
    *,
    size: Sizes,
    tied: bool,
    device: torch.device,
) -> list[str]:
    """Prompts decoded together: those of an evaluation, and those whose answers the target writes."""
    itemsize = outline.ITEMSIZE.get(str(cfg.target.dtype), 2 if device.type == "cuda" else 4)
    weights = target_parameters(size, tied=tied) * itemsize
    room = has / (1 + SPARE) - weights - (CONTEXT if device.type == "cuda" else 0)
    tokens = max(1, int(room / (CACHE_COPIES * kv_bytes_per_token(size, itemsize=itemsize))))
    said = []
    data, suite = cfg.get("data"), cfg.suite
    asked = data.get("answer_batch_tokens") if data else None
    writes = not set(jobs).isdisjoint(("prepare", "train"))
    if writes and asked and int(asked) > tokens and not typed("data.answer_batch_tokens", words):
        data.answer_batch_tokens = tokens
        said.append(f"data.answer_batch_tokens {tokens} (was {asked})")
    longest = _longest(suite)
    batch = suite.get("batch")
    if "eval" in jobs and longest and isinstance(batch, int) and not typed("suite.batch", words):
        most = max(1, tokens // longest)
        if batch > most:
            suite.batch = most
            said.append(f"suite.batch {most} (was {batch})")
    return said


def _longest(suite: DictConfig) -> int:
    """Tokens of the longest prompt of a suite and what follows it; 0: not known."""
    values = counts(suite.get("lengths"))
    return max(values) + sum(count(suite.get(key)) for key in NEW_TOKENS) if values else 0
