"""What eviction costs: time to first token, a training step and the kernels, beside what arithmetic predicts.

Random weights of a published shape, so nothing needs to be downloaded and nothing about quality is said.
The sections run in one process, one after the other; what was measured is handed out as it comes, and a
section that fails is noted and does not end the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from longtrain import methods, plots
from longtrain.bench import clock, first_token, importance_kernels, training
from longtrain.bench.first_token import FULL, FirstTokenSettings
from longtrain.bench.roofline import first_token_tables, first_token_theory, prefill_line
from longtrain.bench.suites import Auto, Bench, Context, Dtype, Row, shape_keys
from longtrain.bench.training import TrainingSettings
from longtrain.costs import hardware
from longtrain.costs.hardware import GPUS
from longtrain.costs.method import PromptShape
from longtrain.costs.model import Sizes
from longtrain.errors import ConfigError
from longtrain.log import get_logger
from longtrain.settings import Count, Lengths, Seconds, Tokens, Words, some_of
from longtrain.systems import System
from longtrain.tables import of_rows
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.targets.shapes import SHAPES

log = get_logger(__name__)

PUBLISHED = ("llama31_8b", "llama32_1b")
"""The shapes of the theoretical table: a target and a draft."""


@dataclass(frozen=True)
class Section:
    """How a section's rows are shown; `Sections` has a method of its name, which measures them.

    Args:
        title: a heading.
        note: how to read the table.
        columns: see `Bench`.
    """

    title: str
    note: str
    columns: Mapping[str, str]


SECTIONS = {
    "theory": Section(
        "Theory",
        "Rooflines at 70% of peak arithmetic and 90% of peak bandwidth, bf16, batch 1; columns with a plus "
        "are milliseconds over the forward. `fused`: the attention weights of the observing rows are never "
        "written out. `second pass`: rows do not ride in the prefill's products, so weights and cache are "
        "read again. `causal` counts half of the attention's square, `full` all of it.",
        {},
    ),
    "ttft": Section(
        "Time to first token",
        "Token ids in, first answer token on the host and the cache compacted. `added` is paired with a run "
        "of the full cache right before or after, p10 and p90 over pairs; `overhead` is the median of the "
        "paired ratios. Theory is that of this GPU. What policies write themselves is launched token by "
        "token, without CUDA graphs. Peak memory has the weights of target and draft in it.",
        first_token.COLUMNS,
    ),
    "parts": Section(
        "Parts of the added time",
        "Each part alone on the cache of one prefilled prompt, by wall clock; `queued`: by CUDA events "
        "behind other work, so that the host's launches are hidden as they are behind a prefill.",
        first_token.PART_COLUMNS,
    ),
    "training": Section(
        "A training step",
        "Target: the packed pass over prompt and response, no gradients, no LM head, the last layer left "
        "after its K and V. Step: forward, backward, clipping and optimizer. Ratio of the medians.",
        training.COLUMNS,
    ),
    "kernels": Section(
        "Importance kernels",
        "One layer, caches cold. The bound reads and writes everything once at peak bandwidth, and "
        "multiplies at peak rate. `difference`: the largest to the torch twin, over its largest value.",
        importance_kernels.COLUMNS,
    ),
}
"""In this order; every row names its own under `section`."""


@dataclass(frozen=True, kw_only=True)
class EvictionCostSettings(FirstTokenSettings):
    """The keys of `suite.cost`; see also `FirstTokenSettings`, whose counts hold for training too.

    Args:
        sections: what to measure.
        shape: the random target's shape.
        draft_shape: the shape of the random draft of systems that write with one, of the same vocabulary.
        dtype: the numbers of both.
        methods: entries of the grammar of `suite.systems`, compared with the full cache.
        train: the method whose training step is measured where `method=` chooses none that is trained.
        train_prompts: prompt lengths of the training step.
        train_response: response tokens behind each.
        train_seconds: of a length in training.
        kernels: rows and keys of each cell.
        kernel_repeats: timed calls of each kernel.
        theory_lengths: prompt tokens of the theoretical table.
        gpus: data sheets of the theoretical table.
    """

    sections: some_of(SECTIONS)  # type: ignore[valid-type]
    shape: Annotated[str, Auto("llama31_8b", "llama_micro")]
    draft_shape: Annotated[str, Auto("llama32_1b", "llama_micro")]
    dtype: Dtype
    methods: Annotated[tuple[Any, ...], Words("a list of systems, as [snapkv, {name: adakv, over: snapkv}]")]
    train: str
    train_prompts: Annotated[Lengths, Auto(["16k", "32k"], [256])]
    train_response: Annotated[Tokens, Auto(512, 64)]
    kernels: Annotated[
        tuple[tuple[Tokens, Tokens], ...],
        Auto([[32, "8k"], [32, "32k"], [32, "128k"], [512, "16k"]], [[8, 256], [32, 512]]),
    ]
    theory_lengths: Lengths = (4096, 8192, 16384, 32768)
    gpus: some_of(GPUS) = ("H100", "H200")  # type: ignore[valid-type]
    train_seconds: Seconds = 15.0
    kernel_repeats: Count = 30

    def __post_init__(self) -> None:
        for name, key in ((self.shape, "shape"), (self.draft_shape, "draft_shape")):
            shape_keys(name, f"suite.cost.{key}")
        if SHAPES[self.shape]["vocab_size"] != SHAPES[self.draft_shape]["vocab_size"]:
            raise ConfigError(
                f"suite.cost.draft_shape={self.draft_shape} has another vocabulary than {self.shape}; a "
                "draft writes tokens that the target reads"
            )
        most = int(SHAPES[self.shape]["max_position_embeddings"])
        longest = max(*(n + 64 for n in self.lengths), *(n + self.train_response for n in self.train_prompts))
        if longest > most:
            raise ConfigError(
                f"suite.cost asks for {longest} positions (prompt and what follows) of shape {self.shape}, "
                f"which has {most}; choose shorter lengths"
            )

    @property
    def sizes(self) -> tuple[Sizes, Sizes]:
        """The target and the draft."""
        return Sizes.of_keys(SHAPES[self.shape]), Sizes.of_keys(SHAPES[self.draft_shape])

    @property
    def training(self) -> TrainingSettings:
        """The settings of the training step."""
        return TrainingSettings(
            shape=self.shape,
            dtype=self.dtype,
            method=self.train,
            lengths=tuple(n + self.train_response for n in self.train_prompts),
            response_tokens=self.train_response,
            warmup=self.warmup,
            repeats=self.repeats,
            min_repeats=self.min_repeats,
            seconds=self.train_seconds,
        )


class Sections:
    """The sections, and the random target that they share."""

    def __init__(self, settings: EvictionCostSettings, context: Context) -> None:
        self.settings, self.context = settings, context
        self.entries = first_token.entries_of(settings.methods, context)

    @cached_property
    def target(self) -> Target:
        """A random target."""
        log.info("building a random target shape=%s dtype=%s", self.settings.shape, self.settings.dtype)
        return self.context.random_target(self.settings.shape, dtype=self.settings.dtype)

    @cached_property
    def systems(self) -> list[System]:
        """The full cache and the systems."""
        shape, dtype = self.settings.draft_shape, self.settings.dtype
        return first_token.systems_of(
            self.target,
            self.entries,
            self.settings.budget_tokens,
            self.context,
            lambda: random_target(shape, seed=1, dtype=dtype, device=self.context.device),
        )

    def theory(self) -> Iterator[Row]:
        """The table for the published shapes, and for the measured ones where these are others."""
        settings = self.settings
        pairs = {PUBLISHED: None}
        if "micro" not in settings.shape:
            pairs[settings.shape, settings.draft_shape] = None
        for shape, draft in pairs:
            sizes = [Sizes.of_keys(SHAPES[name]) for name in (shape, draft)]
            about = {"shape": shape, "draft_shape": draft, "budget": settings.budget_tokens}
            for gpu in hardware.all_named(settings.gpus, "suite.cost.gpus"):
                for causal in (True, False):
                    for tokens in settings.theory_lengths:
                        prompt = PromptShape(sizes[0], tokens, settings.budget_tokens, sizes[1], causal)
                        yield {**about, **prefill_line(self.entries, prompt, gpu)}

    def ttft(self) -> Iterator[Row]:
        """The first token, with the figures of arithmetic for the same shape and GPU beside it."""
        for row in first_token.measure(self.target, self.systems, self.settings, seed=self.context.seed):
            yield {**row, **self._expected(row)}

    def _expected(self, row: Row) -> Row:
        """What arithmetic says of a row; nothing without a data sheet of the device."""
        gpu = self.context.gpu
        if gpu is None or "failed" in row:
            return {}
        size, draft = self.settings.sizes
        prompt = PromptShape(size, row["prompt_tokens"], self.settings.budget_tokens, draft)
        forward_ms = prompt.prefill.ms(gpu)
        if row["method"] == FULL:
            return {"theory_ms": forward_ms}
        entry = next(one for one in self.entries if one.called() == row["method"])
        figures, as_built = first_token_theory(entry, prompt, gpu)
        if as_built not in figures:
            return {}
        return {"theory_ms": figures[as_built], "theory_percent": 100 * figures[as_built] / forward_ms}

    def parts(self) -> Iterator[Row]:
        """Where the added time goes, of systems that run no forward of a whole model for their scores."""
        size = self.settings.sizes[0]
        prompt, gpu = PromptShape(size, 1024, draft=size), GPUS["H100"]
        known = {entry.called(): first_token_theory(entry, prompt, gpu)[0] for entry in self.entries}
        named = [name for name, figures in known.items() if "ms" in figures and "tflop" not in figures]
        systems = [system for system in self.systems if system.family in named]
        return first_token.measure_parts(self.target, systems, self.settings, seed=self.context.seed)

    def training(self) -> Iterator[Row]:
        """A training step beside a prefill of the same rows."""
        context = self.context
        if context.method is not None and methods.get(str(context.method["name"])).objective is None:
            context = replace(context, method=None)
        spec, config = training.chosen(self.settings.training, context)
        trained = training.prepared(spec, config, self.target, seed=context.seed)
        for row in training.measure(self.settings.training, trained, seed=context.seed):
            yield {**row, "prefill": row["target"]} if "target" in row else row

    def kernels(self) -> Iterator[Row]:
        """The importance kernels."""
        settings, target = self.settings, self.target
        return importance_kernels.measure(
            self.context, target.dtype, target.info, settings.kernels, repeats=settings.kernel_repeats
        )


def run(settings: EvictionCostSettings, context: Context) -> Iterator[Row]:
    """The rows of all sections.

    Raises:
        ConfigError: a system is wrong.
        Exception: the first fault of a section, once everything else is measured.
    """
    sections = Sections(settings, context)
    faults: list[Exception] = []
    for name in settings.sections:
        failed: Row = {"section": name}
        with clock.may_fail(failed, context.device, Exception) as fault:
            for row in getattr(sections, name)():
                yield {"section": name, **row}
        if fault:  # whatever else there is to measure is worth having
            faults += fault
            yield failed
    if faults:
        raise faults[0]


def report(rows: Sequence[Row], settings: EvictionCostSettings, context: Context) -> str:
    """All sections that have rows, every figure beside what arithmetic predicts where that is known."""
    found = [f"# Cost of eviction: {settings.shape} on {context.device_name}"]
    entries = first_token.entries_of(settings.methods, context)
    papers = [methods.get(one.method.name).cost.note for one in entries if one.method is not None]
    for name, section in SECTIONS.items():
        own = [row for row in rows if row["section"] == name]
        if own:
            body = first_token_tables(own) if name == "theory" else of_rows(own, section.columns)
            note = " ".join([section.note, *(papers if name == "ttft" else [])])
            found.append(f"## {section.title}\n\n{note}\n\n{body}")
    return "\n\n".join(found)


def pictures(rows: Sequence[Row]) -> dict[str, bytes]:
    """Added time of each system by prompt length, measured and predicted, and the parts of it."""
    measured = [row for row in rows if row["section"] == "ttft" and "extra_ms" in row]
    if not measured:
        return {}
    figure, (left, right) = plots.panels(2, size=(5.5, 4.0))
    for name in dict.fromkeys(row["method"] for row in measured):
        own = [row for row in measured if row["method"] == name]
        figures = [plots.of_spread(row["extra_ms"]) for row in own]
        plots.points(left, [row["prompt_tokens"] for row in own], figures, name)
        predicted = [(row["prompt_tokens"], row["theory_ms"]) for row in own if "theory_ms" in row]
        if predicted:
            left.plot(*zip(*predicted, strict=True), linestyle=":", color=left.lines[-1].get_color())
    plots.lengths_axis(left, sorted({row["prompt_tokens"] for row in measured}))
    if all(row["extra_ms"]["median"] > 0 for row in measured):
        left.set_yscale("log")
    plots.label(left, "prompt tokens", "added to the first token, ms (dotted: theory)")
    parts = [row for row in rows if row["section"] == "parts" and "failed" not in row]
    names = [f"{row['method']}\n{row['prompt_tokens']}" for row in parts]
    keys = ("scores", "selection", "compaction") if parts else ()
    plots.stacks(right, names, {key: [row[key]["ms"]["median"] for row in parts] for key in keys})
    plots.label(right, "", "each part alone, ms")
    return {"eviction.png": plots.png(figure)}


BENCH = Bench(settings=EvictionCostSettings, run=run, group="cost", report=report, pictures=pictures)
