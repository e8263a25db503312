"""Lowers memory use of recipes and defaults to the free memory: packed sequences, chunks and batches.

A recipe's sequence lengths were chosen for the GPU it was measured on. If they do not fit this device,
sequences become shorter and a step has more of them, so that the tokens per step stay the same; fewer prompts
are decoded together. Values typed on the command line are never changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longtrain.config import RunConfig
from longtrain.costs.footprint import CONTEXT, SPARE
from longtrain.costs.model import Sizes
from longtrain.costs.training import PackedSequence, kv_bytes_per_token, target_parameters
from longtrain.errors import LongtrainError
from longtrain.jobs.planning.run_plan import ITEMSIZE, RunPlan, devices_of
from longtrain.prompt.following import NEW_TOKENS, count, counts, typed

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

CHUNK = 2048
"""Tokens whose activations exist at once, if those of a whole packed sequence do not fit."""
SEQUENCES = "accumulate_grad_batches"
"""Key of `trainer`: packed sequences of a rank in a step."""
CACHE_COPIES = 2
"""Room for a batch's KV cache, in multiples of its size: the cache, and a copy made during prefill."""


def fit_memory(cfg: DictConfig, jobs: Sequence[str], words: Sequence[str]) -> list[str]:
    """Lower sequences and batches of recipes and defaults to the free memory.

    Args:
        cfg: the resolved configuration; changed in place.
        jobs: the jobs to run; only those that load a target are considered.
        words: the overrides of the command line.

    Returns:
        A line that reports the changes and the free memory, if anything was changed.
    """
    run = RunConfig.from_hydra(cfg)
    if set(jobs).isdisjoint(("prepare", "train", "eval")) or not run.target.path:
        return []
    plan = RunPlan(run)
    try:
        size = plan.size
    except (LongtrainError, OSError, ValueError, KeyError, TypeError):
        return []  # raises when it is loaded later
    changes: list[str] = []
    free = None
    if "train" in jobs and (device := _trains_on(run)) is not None and (free := _free(device, run)):
        changes += _fit_sequences(cfg, words, free, on_gpu=device.type == "cuda")
    import torch

    device = torch.device(run.target.device_here())
    if (room := _free(device, run)) is not None:
        free = free or room
        changes += _fit_batches(cfg, jobs, words, room, size=size, tied=plan.tied, device=device)
    if not changes or free is None:
        return []
    return [f"fitted to {free / 2**30:.3g} GiB of free memory: {', '.join(changes)}"]


def _trains_on(cfg: RunConfig) -> torch.device | None:
    """The training device, or None if this machine has no such device."""
    import torch

    accelerator = cfg.trainer.accelerator
    if accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda") if torch.cuda.is_available() else None


def _free(device: torch.device, cfg: RunConfig) -> float | None:
    """Bytes available to a run; with several GPUs the smallest one's total, so that all ranks get the same
    value.
    """
    import torch

    if device.type != "cuda":
        from longtrain.jobs.ranks_check import host_bytes

        found = host_bytes()
        return None if found is None else found / (1 + SPARE)
    if not torch.cuda.is_available():
        return None
    if devices_of(cfg.trainer) * cfg.trainer.num_nodes > 1:
        count = torch.cuda.device_count()
        return float(min(torch.cuda.get_device_properties(i).total_memory for i in range(count)))
    return float(torch.cuda.mem_get_info(device)[0])


def _fit_sequences(cfg: DictConfig, words: Sequence[str], free: float, *, on_gpu: bool) -> list[str]:
    """Reduce the chunk first, then halve sequences and double their number per step."""
    if not (cfg.method and cfg.get("data") and cfg.data.get("stages")):
        return []
    if (kept := _earlier_fit(cfg, words)) is not None:
        return kept
    before, chunk = [int(one.sequence_tokens) for one in cfg.data.stages], _chunk(cfg)
    changes = []
    for change in _smaller(cfg, words):
        need = _needed(RunPlan(RunConfig.from_hydra(cfg)))
        if need is None:
            return []
        if need * (1 + SPARE) + (CONTEXT if on_gpu else 0) <= free:
            break
        change()
    if _chunk(cfg) != chunk:
        changes.append(f"method.chunk_tokens {_chunk(cfg)} (was {chunk})")
    if (after := [int(one.sequence_tokens) for one in cfg.data.stages]) != before:
        sequences = cfg.trainer[SEQUENCES]
        changes.append(f"data.stages.sequence_tokens {after} (was {before}), {sequences} sequences a step")
    return changes


def _needed(plan: RunPlan) -> float | None:
    """A rank's peak memory in bytes, or None if the run cannot be planned."""
    spec = plan.trained_method
    if spec.objective is None or spec.export is not None or spec.data is not None:
        return None
    try:
        return float(max(plan.memory(row, plan.given).peak for row in _sequences(plan.cfg)))
    except (LongtrainError, ValueError, TypeError):
        return None  # the job's own checks report the error


def _sequences(cfg: RunConfig) -> list[PackedSequence]:
    """A packed sequence of each stage, with the number of documents for prompts of average length."""
    answer, usual = int(cfg.data_values.get("answer_tokens") or 0), None
    if prompts := counts(cfg.data_values.get("prompt_tokens")):
        low, high = prompts[0], prompts[-1]
        usual = (low if low == high else (high - low) / math.log(high / low)) + answer
    return [
        PackedSequence(one.sequence_tokens, one.doc_tokens, answer, usual and min(usual, one.doc_tokens))
        for one in cfg.stages
    ]


def _smaller(cfg: DictConfig, words: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Changes to apply one after another until the sequences fit; the last one does nothing."""
    if (
        _chunk(cfg) is not None
        and not 0 < int(_chunk(cfg) or 0) <= CHUNK
        and not typed("method.chunk_tokens", words)
    ):

        def chunked() -> None:
            cfg.method.chunk_tokens = CHUNK

        yield chunked
    keys = ("data.stages", f"trainer.{SEQUENCES}", "trainer.sequences_per_step")
    if not any(typed(key, words) for key in keys) and cfg.trainer.get("sequences_per_step") is None:

        def halved() -> None:
            for stage in cfg.data.stages:
                stage.sequence_tokens //= 2
            cfg.trainer[SEQUENCES] *= 2

        while all(
            one.sequence_tokens % 2 == 0 and one.sequence_tokens // 2 >= one.doc_tokens
            for one in cfg.data.stages
        ):
            yield halved
    yield lambda: None


def _chunk(cfg: DictConfig) -> int | None:
    """`method.chunk_tokens`, or None if the method has no such key."""
    value = cfg.method.get("chunk_tokens")
    return value if isinstance(value, int) else None


def _earlier_fit(cfg: DictConfig, words: Sequence[str]) -> list[str] | None:
    """For a resumed run, use the sequences and chunks that its first command chose, independent of free
    memory.

    Returns:
        An empty list, or None if no run is resumed or its sequences do not derive from these settings.
    """
    import yaml

    where = Path(cfg.run_dir) / "train"
    if str(cfg.get("resume", "auto")) == "never" or not any((where / "checkpoints").glob("*.ckpt")):
        return None
    try:
        kept = yaml.safe_load((where / "config.yaml").read_text(encoding="utf-8"))
        sequences, accumulate = (
            [int(one["sequence_tokens"]) for one in kept["data"]["stages"]],
            kept["trainer"][SEQUENCES],
        )
        chunk = kept["method"].get("chunk_tokens")
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
    now = [int(one.sequence_tokens) * cfg.trainer[SEQUENCES] for one in cfg.data.stages]
    if now != [tokens * accumulate for tokens in sequences]:
        return None
    if not typed("data.stages", words) and not typed(f"trainer.{SEQUENCES}", words):
        for stage, tokens in zip(cfg.data.stages, sequences, strict=True):
            stage.sequence_tokens = tokens
        cfg.trainer[SEQUENCES] = accumulate
    if chunk == CHUNK and _chunk(cfg) is not None and not typed("method.chunk_tokens", words):
        cfg.method.chunk_tokens = chunk
    return []


def _fit_batches(
    cfg: DictConfig,
    jobs: Sequence[str],
    words: Sequence[str],
    free: float,
    *,
    size: Sizes,
    tied: bool,
    device: torch.device,
) -> list[str]:
    """Lower the number of prompts decoded together, in evaluations and where `prepare` writes answers."""
    itemsize = ITEMSIZE.get(str(cfg.target.dtype), 2 if device.type == "cuda" else 4)
    weights = target_parameters(size, tied=tied) * itemsize
    room = free / (1 + SPARE) - weights - (CONTEXT if device.type == "cuda" else 0)
    tokens = max(1, int(room / (CACHE_COPIES * kv_bytes_per_token(size, itemsize=itemsize))))
    changes = []
    data, suite = cfg.get("data"), cfg.suite
    asked = data.get("answer_batch_tokens") if data else None
    writes = not set(jobs).isdisjoint(("prepare", "train"))
    if writes and asked and int(asked) > tokens and not typed("data.answer_batch_tokens", words):
        data.answer_batch_tokens = tokens
        changes.append(f"data.answer_batch_tokens {tokens} (was {asked})")
    longest = _longest(suite)
    batch = suite.get("batch")
    if "eval" in jobs and longest and isinstance(batch, int) and not typed("suite.batch", words):
        most = max(1, tokens // longest)
        if batch > most:
            suite.batch = most
            changes.append(f"suite.batch {most} (was {batch})")
    return changes


def _longest(suite: DictConfig) -> int:
    """Tokens of a suite's longest prompt and its answer; 0 if unknown."""
    values = counts(suite.get("lengths"))
    return max(values) + sum(count(suite.get(key)) for key in NEW_TOKENS) if values else 0
