"""Time of a training step by part: the target's pass, the draft, the loss, the optimizer and copies.

One step runs under torch's profiler. On a GPU the kernels' times are summed by the range that launched them;
on a CPU the operators' times. The loss computes its gradients together with its value, so both count as loss;
kernels outside the other parts count as the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, record_function

_CPU, _CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
TARGET, OPTIMIZER = "longtrain.target", "longtrain.optimizer"
"""Names of the profiler ranges around these parts (`part`)."""

LOSSES = (
    "_DraftLoss",
    "_LinearCE",
    "_LinearKL",
    "_LinearTopKL",
    "_ImportanceKL",
    "_SlotLoss",
    "LigerFusedLinearCrossEntropyFunction",
)
"""Profiler names of the losses' autograd functions."""


def part(name: str) -> record_function:
    """Return the profiler range of a part; without a profiler it costs a few microseconds."""
    return record_function(name)


def shares(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return milliseconds and share of each part of a step, by the part's name, and `total_ms`.

    Args:
        step: runs one step; must have run before.
        device: the device it runs on.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as hook:
        with record_function("longtrain.step"):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    return _shares(hook.key_averages(), on_gpu=on_gpu)


def _shares(events: EventList, *, on_gpu: bool) -> dict[str, Any]:
    """See `shares`."""
    if on_gpu:
        own = [one for one in events if one.device_type == _CUDA and not one.is_user_annotation]
        total = sum(one.self_device_time_total for one in own)
        copies = sum(one.self_device_time_total for one in own if "HtoD" in one.key)
    else:
        total, copies = sum(one.self_cpu_time_total for one in events), 0.0

    def of(*names: str) -> float:
        found = [one for one in events if one.key in names and one.device_type == _CPU]
        return sum(one.device_time_total if on_gpu else one.cpu_time_total for one in found)

    times = {"target": of(TARGET), "loss": of(*LOSSES), "optimizer": of(OPTIMIZER), "copies": copies}
    times["draft"] = max(0.0, total - sum(times.values()))
    parts = {name: {"ms": time / 1e3, "share": time / total} for name, time in times.items()}
    return {**parts, "total_ms": total / 1e3, "launches": sum(one.count for one in own) if on_gpu else None}
