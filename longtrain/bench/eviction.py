"""What eviction costs: time to first token, a training step and the kernels, beside what arithmetic predicts.

Random weights of a published shape, so nothing needs to be downloaded and nothing about quality is said.
The sections run in one process, one after the other; what was measured is handed out as it comes, and a
section that fails is noted and does not end the others.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from longtrain.bench import (
    eviction_kernels,
    eviction_parts,
    eviction_theory,
    eviction_train,
    eviction_ttft,
    timing,
)
from longtrain.bench.eviction_theory import Setup
from longtrain.costs.hardware import Gpu, all_named, gpu_called
from longtrain.costs.model import Sizes
from longtrain.errors import ConfigError
from longtrain.log import get_logger
from longtrain.methods import policies
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.targets.shapes import SHAPES

log = get_logger(__name__)

SECTIONS = ("theory", "ttft", "parts", "training", "kernels")
"""In this order; every row of the report names its own under `section`."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        shape: of the random target, a name of `longtrain.targets.shapes`.
        draft_shape: of SpecKV's random draft, with the target's vocabulary.
        dtype: of both.
        device: cuda or cpu.
        ttft: lengths and methods.
        training: prompt lengths of the training step.
        kernels: (rows, keys) cells of the kernels.
        theory_lengths: prompt lengths of the theory's table; its shapes are llama31_8b and llama32_1b, and
            `shape` and `draft_shape` where these are others and not micro ones.
        gpus: names of `costs.hardware.GPUS`.
        sections: those of `SECTIONS` to run.
        options: method -> options of its policy, or keys of LookaheadKV's Config.
    """

    shape: str
    draft_shape: str
    dtype: str
    device: str
    ttft: eviction_ttft.Settings
    training: eviction_train.Settings
    kernels: tuple[tuple[int, int], ...]
    kernel_repeats: int = 30
    theory_lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    gpus: tuple[str, ...] = ("H100", "H200")
    sections: tuple[str, ...] = SECTIONS
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def check(self) -> None:
        """Tell mistakes before anything is built.

        Raises:
            ConfigError: an unknown section, method, shape or GPU, or a length the shape has no positions for.
        """
        for name in self.sections:
            if name not in SECTIONS:
                raise ConfigError(f"suite.cost.sections names '{name}'; known: {', '.join(SECTIONS)}")
        known = ("lookaheadkv", *policies.POLICIES)
        for name in self.ttft.methods:
            if name not in known:
                raise ConfigError(f"suite.cost.methods names '{name}'; known: {', '.join(known)}")
        if "kvzip" in self.ttft.methods:
            raise ConfigError(
                "suite.cost.methods names kvzip, which asks the target in words; random weights come without "
                "a tokenizer, so it cannot be measured here"
            )
        for shape in (self.shape, self.draft_shape):
            if shape not in SHAPES:
                raise ConfigError(f"suite.cost names the shape '{shape}'; known: {', '.join(SHAPES)}")
        if self.shape_vocabulary(self.shape) != self.shape_vocabulary(self.draft_shape):
            raise ConfigError(
                f"suite.cost.draft_shape={self.draft_shape} has another vocabulary than {self.shape}; "
                "SpecKV's draft writes tokens that the target reads"
            )
        all_named(self.gpus, "suite.cost.gpus")
        most = int(SHAPES[self.shape]["max_position_embeddings"])
        train = [n + self.training.response for n in self.training.prompts]
        longest = max([*(n + 64 for n in self.ttft.lengths), *train], default=0)
        if longest > most:
            raise ConfigError(
                f"suite.cost asks for {longest} positions (prompt and what follows) of shape {self.shape}, "
                f"which has {most}; choose shorter lengths"
            )

    @staticmethod
    def shape_vocabulary(shape: str) -> int:
        """Tokens of a shape."""
        return int(SHAPES[shape]["vocab_size"])

    @property
    def setup(self) -> Setup:
        """The theory's setting for the measured shape."""
        sizes = [Sizes.of_keys(SHAPES[name]) for name in (self.shape, self.draft_shape)]
        return Setup(sizes[0], sizes[1], budget=self.ttft.budget)

    @property
    def gpu(self) -> Gpu | None:
        """The data sheet of the device at hand, if there is one here."""
        return gpu_called(torch.cuda.get_device_name()) if self.device.startswith("cuda") else None


def measure(settings: Settings, rows: list[Row], keep: Callable[[list[Row]], object]) -> None:
    """Run the sections.

    Args:
        settings: see `Settings`.
        rows: what is measured is added here, so that it is there whatever happens later.
        keep: handed all rows whenever there is a new one.

    Raises:
        ConfigError: see `Settings.check`.
        Exception: the first fault of a section, once everything else is measured and kept.
    """
    settings.check()
    device = torch.device(settings.device)
    faults: list[Exception] = []
    built: list[Target] = []

    def target() -> Target:
        if not built:
            log.info("building a random target shape=%s dtype=%s", settings.shape, settings.dtype)
            built.append(random_target(settings.shape, dtype=settings.dtype, device=device))
        return built[0]

    work: dict[str, Callable[[], Iterator[Row]]] = {
        "theory": lambda: _theory(settings),
        "ttft": lambda: _ttft(settings, target()),
        "parts": lambda: eviction_parts.measure(target(), replace(settings.ttft, options=settings.options)),
        "training": lambda: eviction_train.measure(target(), settings.training),
        "kernels": lambda: _kernels(settings, target()),
    }
    for name in (name for name in SECTIONS if name in settings.sections):
        try:
            for row in work[name]():
                rows.append({"section": name, **row})
                keep(rows)
                log.info("section=%s %s", name, _brief(row))
        except Exception as error:  # whatever else there is to measure is worth having
            log.exception("section=%s failed", name)
            traceback.clear_frames(error.__traceback__)  # or what they hold stays on the device
            faults.append(error)
            rows.append({"section": name, "failed": f"{type(error).__name__}: {error}"})
            keep(rows)
        timing.release(device)
    if faults:
        raise faults[0]


def _brief(row: Row) -> str:
    """A row's numbers and names in one line: medians of what was measured more than once."""
    words = []
    for key, value in row.items():
        value = value.get("median", value.get("ms", {}).get("median")) if isinstance(value, dict) else value
        if isinstance(value, int | float | str):
            words.append(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}")
    return " ".join(words)


def _theory(settings: Settings) -> Iterator[Row]:
    """The table for the published shapes."""
    pairs = {("llama31_8b", "llama32_1b"): None}
    if "micro" not in settings.shape:
        pairs[settings.shape, settings.draft_shape] = None
    for shape, draft in pairs:
        setup = replace(settings.setup, size=Sizes.of_keys(SHAPES[shape]), draft=Sizes.of_keys(SHAPES[draft]))
        gpus = all_named(settings.gpus, "suite.cost.gpus")
        for line in eviction_theory.table(setup, settings.theory_lengths, gpus):
            yield {"shape": shape, "draft_shape": draft, "budget": setup.budget, **line}


def _ttft_settings(settings: Settings, target: Target) -> eviction_ttft.Settings:
    """With SpecKV's draft where it is measured."""
    options = dict(settings.options)
    if "speckv" in settings.ttft.methods:
        log.info("building a random draft shape=%s dtype=%s", settings.draft_shape, settings.dtype)
        draft = random_target(settings.draft_shape, seed=1, dtype=settings.dtype, device=target.device)
        options["speckv"] = {**options.get("speckv", {}), "draft": draft}
    return replace(settings.ttft, options=options)


def _ttft(settings: Settings, target: Target) -> Iterator[Row]:
    """Measured rows with the theory's figures for the same shape and GPU beside them."""
    for row in eviction_ttft.measure(target, _ttft_settings(settings, target)):
        yield {**row, **_expected(settings, row)}


EXPECTED = {"lookaheadkv": "lookaheadkv_second_pass_fused_ms", "full": "forward_ms"} | {
    name: f"{name}_ms" for name in ("snapkv", "laq", "speckv")
}
"""Method -> its column of the theory; our lookahead rows are a second pass and no weights are written out."""


def _expected(settings: Settings, row: Row) -> Row:
    """The theory's added milliseconds and overhead; nothing for a GPU or method that it does not know."""
    if settings.gpu is None or row["method"] not in EXPECTED or "failed" in row:
        return {}
    line = eviction_theory.row(settings.setup, row["prompt_tokens"], settings.gpu)
    ms = line[EXPECTED[row["method"]]]
    share = {} if row["method"] == "full" else {"theory_percent": 100 * ms / line["forward_ms"]}
    return {"theory_ms": ms, **share}


def _kernels(settings: Settings, target: Target) -> Iterator[Row]:
    how = eviction_kernels.Settings(
        target.device, target.dtype, settings.kernels, repeats=settings.kernel_repeats
    )
    return eviction_kernels.measure(how, target.info)
