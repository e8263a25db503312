"""Cost of a LookaheadKV training step: its time beside a no-grad prefill of the same rows, and peak memory.

The prefill is the target's packed pass over prompt and response up to the last layer's K and V, without LM
head and without a watch. The step is the objective's forward, backward, clipping and the optimizer. Both
run in turns, so that a drifting clock meets both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from longtrain import methods
from longtrain.bench import timing
from longtrain.bench.report import gib
from longtrain.data.rows.batch import Batch
from longtrain.log import get_logger
from longtrain.targets.step import Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

COLUMNS = {
    "prompt": "prompt_tokens",
    "response": "response_tokens",
    "prefill ms": "prefill.ms.median",
    "step ms": "step.ms.median",
    "step / prefill": "ratio",
    "pairs p10": "paired_ratio.p10",
    "pairs p90": "paired_ratio.p90",
    "prefill peak GiB": "prefill.peak_gib",
    "step peak GiB": "step.peak_gib",
    "weights GiB": "before_gib",
    "failed": "failed",
}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        prompts: prompt lengths, tokens.
        response: response length, tokens.
        method: keys of LookaheadKV's Config.
        warmup: pairs not counted.
        repeats: most pairs counted, and `least` the fewest.
        least: pairs counted at any rate.
        seconds: of a length; no pair starts later.
        seed: of weights and tokens.
    """

    prompts: tuple[int, ...]
    response: int
    method: dict[str, Any] = field(default_factory=dict)
    warmup: int = 2
    repeats: int = 10
    least: int = 2
    seconds: float = 30.0
    seed: int = 0


def measure(target: Target, settings: Settings) -> Iterator[dict[str, Any]]:
    """One entry a prompt length, as they are ready; one that does not fit in memory says so."""
    spec = methods.get("lookaheadkv")
    assert spec.objective is not None
    config = spec.config(**settings.method)
    torch.manual_seed(settings.seed)
    module = spec.build(config, target.info).to(target.device)
    objective = spec.objective(module, target, config).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=target.device.type == "cuda")
    for prompt in settings.prompts:
        row: dict[str, Any] = {"prompt_tokens": prompt, "response_tokens": settings.response}
        try:
            row |= _measure(target, objective, optimizer, prompt, settings)
        except torch.OutOfMemoryError as error:
            row["failed"] = f"out of memory: {str(error).partition('.')[0]}"
        optimizer.zero_grad(set_to_none=True)
        timing.release(target.device)
        yield row


def _measure(
    target: Target,
    objective: Any,
    optimizer: torch.optim.Optimizer,
    prompt: int,
    settings: Settings,
) -> dict[str, Any]:
    device = target.device
    total = prompt + settings.response
    pos_T = torch.arange(total, device=device)
    trained = [value for group in optimizer.param_groups for value in group["params"]]
    batch = document(prompt, settings.response, target.info.vocab_size, settings.seed).to(device)

    def prefill() -> None:
        with torch.no_grad():
            last = target.info.n_layers - 1
            target.packed(batch.ids_T, pos_T, batch.bounds, Want("none", stop_at_layer=last))

    def step() -> None:
        with _autocast(target):
            loss = objective(batch)
        (loss.total / batch.documents_in_step).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(settings.warmup):
        prefill()
        step()
    timing.release(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    going = timing.rounds(settings.repeats, least=settings.least, seconds=settings.seconds)
    plain: list[timing.Run] = []
    full: list[timing.Run] = []
    while going(len(full)):
        plain.append(timing.run(prefill, device))
        full.append(timing.run(step, device))
    return {
        "trained_parameters": sum(value.numel() for value in trained),
        "before_bytes": before,
        "before_gib": gib(before),
        "prefill": timing.summary(plain),
        "step": timing.summary(full),
        **timing.versus(plain, full),
    }


def document(prompt: int, response: int, vocab_size: int, seed: int) -> Batch:
    """One random document; its last `response` tokens are the labels."""
    coins = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(vocab_size, (prompt + response,), generator=coins)
    mask_T = torch.zeros(prompt + response, dtype=torch.bool)
    mask_T[prompt:] = True
    bounds = (0, prompt + response)
    return Batch(ids_T, bounds, mask_T, seed=seed, tokens_in_step=response, documents_in_step=1)


def _autocast(target: Target) -> Any:
    if target.dtype in (torch.bfloat16, torch.float16):
        return torch.autocast(target.device.type, dtype=target.dtype)
    return nullcontext()
