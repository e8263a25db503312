"""What eviction costs: time to first token, a training step and the kernels, beside what arithmetic predicts.

Random weights of a published shape, so nothing needs to be downloaded and nothing about quality is said.
The sections run in one process, one after the other; what was measured is handed out as it comes, and a
section that fails is noted and does not end the others.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from longtrain import methods, plots
from longtrain.bench import clock, first_token, importance_kernels, training
from longtrain.bench.first_token import FULL, FirstTokenSettings
from longtrain.bench.suites import Bench, Context, Row, shape_keys
from longtrain.bench.training import TrainingSettings
from longtrain.costs import hardware
from longtrain.costs.hardware import GPUS, Gpu
from longtrain.costs.method import PromptShape
from longtrain.costs.model import Sizes
from longtrain.errors import ConfigError
from longtrain.log import get_logger
from longtrain.settings import Count, CountOrZero, Lengths, Seconds, Tokens, Words, some_of
from longtrain.systems import Entry, System
from longtrain.tables import of_rows
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.targets.shapes import SHAPES

log = get_logger(__name__)

SECTIONS = ("theory", "ttft", "parts", "training", "kernels")
"""In this order; every row names its own under `section`."""
PUBLISHED = ("llama31_8b", "llama32_1b")
"""The shapes of the theoretical table: a target and a draft."""


@dataclass(frozen=True)
class EvictionCostSettings:
    """The keys of `suite.cost`.

    Args:
        sections: what to measure.
        shape: the random target's shape.
        draft_shape: the shape of the random draft of systems that write with one, of the same vocabulary.
        dtype: the numbers of both.
        lengths: prompt tokens of the first token.
        methods: entries of the grammar of `suite.systems`, compared with the full cache.
        budget_tokens: rows kept of each layer and KV head.
        warmup: runs not counted.
        repeats: most pairs of a system and length, and of passes and steps in training.
        min_repeats: pairs run whatever the time.
        seconds: of a length of the first token; no further round starts after it.
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
    shape: str
    draft_shape: str
    dtype: Literal["bfloat16", "float16", "float32"]
    lengths: Lengths
    methods: Annotated[tuple[Any, ...], Words("a list of systems, as [snapkv, {name: adakv, over: snapkv}]")]
    train: str
    train_prompts: Lengths
    train_response: Tokens
    kernels: tuple[tuple[Tokens, Tokens], ...]
    theory_lengths: Lengths = (4096, 8192, 16384, 32768)
    gpus: some_of(GPUS) = ("H100", "H200")  # type: ignore[valid-type]
    budget_tokens: Count = 128
    warmup: CountOrZero = 2
    repeats: Count = 20
    min_repeats: Count = 3
    seconds: Seconds = 40.0
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
    def first_token(self) -> FirstTokenSettings:
        """The settings of the first token."""
        few = {"repeats": self.repeats, "least": self.min_repeats, "seconds": self.seconds}
        return FirstTokenSettings(self.lengths, self.methods, self.budget_tokens, self.warmup, **few)  # type: ignore[arg-type]

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
        self.entries = first_token.entries(settings.methods, context)

    @cached_property
    def target(self) -> Target:
        """A random target."""
        log.info("building a random target shape=%s dtype=%s", self.settings.shape, self.settings.dtype)
        return self.context.random_target(self.settings.shape, dtype=self.settings.dtype, fused=False)

    @cached_property
    def systems(self) -> list[System]:
        """The full cache and the systems."""
        settings = self.settings
        return first_token.built(
            self.target,
            settings.first_token,
            self.context,
            lambda: random_target(
                settings.draft_shape, seed=1, dtype=settings.dtype, device=self.context.device
            ),
        )

    def theory(self) -> Iterator[Row]:
        """The table for the published shapes, and for the measured ones where these are others."""
        pairs = {PUBLISHED: None}
        if "micro" not in self.settings.shape:
            pairs[self.settings.shape, self.settings.draft_shape] = None
        for shape, draft in pairs:
            sizes = [Sizes.of_keys(SHAPES[name]) for name in (shape, draft)]
            about = {"shape": shape, "draft_shape": draft, "budget": self.settings.budget_tokens}
            for gpu in hardware.all_named(self.settings.gpus, "suite.cost.gpus"):
                for causal in (True, False):
                    for tokens in self.settings.theory_lengths:
                        prompt = PromptShape(sizes[0], tokens, self.settings.budget_tokens, sizes[1], causal)
                        yield {**about, **line(self.entries, prompt, gpu)}

    def ttft(self) -> Iterator[Row]:
        """The first token, with the figures of arithmetic for the same shape and GPU beside it."""
        how = self.settings.first_token
        for row in first_token.measure(self.target, self.systems, how, seed=self.context.seed):
            yield {**row, **self._expected(row)}

    def _expected(self, row: Row) -> Row:
        gpu = self.context.gpu
        if gpu is None or "failed" in row:
            return {}
        sizes = [Sizes.of_keys(SHAPES[name]) for name in (self.settings.shape, self.settings.draft_shape)]
        prompt = PromptShape(sizes[0], row["prompt_tokens"], self.settings.budget_tokens, sizes[1])
        forward_ms = prompt.prefill.ms(gpu)
        if row["method"] == FULL:
            return {"theory_ms": forward_ms}
        entry = next(one for one in self.entries if one.called() == row["method"])
        figures, as_built = first_token.theory(entry, prompt, gpu)
        if as_built not in figures:
            return {}
        return {"theory_ms": figures[as_built], "theory_percent": 100 * figures[as_built] / forward_ms}

    def parts(self) -> Iterator[Row]:
        """Where the added time goes, of systems that run no forward of a whole model for their scores."""
        size = Sizes.of(self.target.info)
        prompt, gpu = PromptShape(size, 1024, draft=size), GPUS["H100"]
        known = {entry.called(): first_token.theory(entry, prompt, gpu)[0] for entry in self.entries}
        named = [name for name, figures in known.items() if "ms" in figures and "tflop" not in figures]
        systems = [system for system in self.systems if system.family in named]
        return first_token.measure_parts(
            self.target, systems, self.settings.first_token, seed=self.context.seed
        )

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
        return importance_kernels.measure(
            self.context,
            self.target.dtype,
            self.target.info,
            self.settings.kernels,
            repeats=self.settings.kernel_repeats,
        )


def line(entries: Sequence[Entry], prompt: PromptShape, gpu: Gpu) -> Row:
    """Milliseconds and TFLOP of a prefill, and what each system adds to it."""
    base = prompt.prefill
    found: Row = {
        "gpu": gpu.name,
        "prompt_tokens": prompt.tokens,
        "attention": "causal" if prompt.causal else "full",
        "forward_tflop": base.flops * 1e-12,
        "forward_ms": base.ms(gpu),
    }
    for entry in entries:
        figures, _ = first_token.theory(entry, prompt, gpu)
        found |= {f"{entry.called()}_{key}": value for key, value in figures.items()}
    return found


def run(settings: EvictionCostSettings, context: Context) -> Iterator[Row]:
    """The rows of all sections.

    Raises:
        ConfigError: a system is wrong.
        Exception: the first fault of a section, once everything else is measured.
    """
    sections = Sections(settings, context)
    faults: list[Exception] = []
    for name in settings.sections:
        work: Callable[[], Iterator[Row]] = getattr(sections, name)
        try:
            for row in work():
                yield {"section": name, **row}
        except Exception as error:  # whatever else there is to measure is worth having
            log.exception("section=%s failed", name)
            traceback.clear_frames(error.__traceback__)  # or what they hold stays on the device
            faults.append(error)
            yield {"section": name, "failed": f"{type(error).__name__}: {error}"}
        clock.release(context.device)
    if faults:
        raise faults[0]


NOTES = {
    "theory": (
        "Rooflines at 70% of peak arithmetic and 90% of peak bandwidth, bf16, batch 1; columns with a plus "
        "are milliseconds over the forward. `fused`: the attention weights of the observing rows are never "
        "written out. `second pass`: rows do not ride in the prefill's products, so weights and cache are "
        "read again. `causal` counts half of the attention's square, `full` all of it."
    ),
    "ttft": (
        "Token ids in, first answer token on the host and the cache compacted. `added` is paired with a run "
        "of the full cache right before, p10 and p90 over pairs; `overhead` is the median of the paired "
        "ratios. Theory is that of this GPU. What policies write themselves is launched token by token, "
        "without CUDA graphs. Peak memory has the weights of target and draft in it."
    ),
    "parts": (
        "Each part alone on the cache of one prefilled prompt, by wall clock; `queued`: by CUDA events "
        "behind other work, so that the host's launches are hidden as they are behind a prefill."
    ),
    "training": (
        "Target: the packed pass over prompt and response, no gradients, no LM head, the last layer left "
        "after its K and V. Step: forward, backward, clipping and optimizer. Ratio of the medians."
    ),
    "kernels": (
        "One layer, caches cold. The bound reads and writes everything once at peak bandwidth, and "
        "multiplies at peak rate. `difference`: the largest to the torch twin, over its largest value."
    ),
}
TITLES = {
    "theory": "Theory",
    "ttft": "Time to first token",
    "parts": "Parts of the added time",
    "training": "A training step",
    "kernels": "Importance kernels",
}
COLUMNS = {
    "ttft": first_token.COLUMNS,
    "parts": first_token.PART_COLUMNS,
    "training": training.COLUMNS,
    "kernels": importance_kernels.COLUMNS,
}


def report(rows: Sequence[Row], settings: EvictionCostSettings, context: Context) -> str:
    """All sections that have rows, every figure beside what arithmetic predicts where that is known."""
    found = [f"# Cost of eviction: {settings.shape} on {context.device_name}"]
    for name, title in TITLES.items():
        own = [row for row in rows if row["section"] == name]
        if own:
            body = _theory(own) if name == "theory" else of_rows(own, COLUMNS[name])
            notes = [NOTES[name], *(_method_notes(settings, context) if name == "ttft" else [])]
            found.append(f"## {title}\n\n{' '.join(notes)}\n\n{body}")
    return "\n\n".join(found)


def _method_notes(settings: EvictionCostSettings, context: Context) -> list[str]:
    """What the papers measured."""
    entries = first_token.entries(settings.methods, context)
    return [methods.get(one.method.name).cost.note for one in entries if one.method is not None]


def _theory(rows: Sequence[Row]) -> str:
    """A table for each shape and GPU."""
    done = [row for row in rows if "failed" not in row]
    found = []
    columns = {"prompt": "prompt_tokens", "attention": "attention"}
    for key in dict.fromkeys(key for row in done for key in row if key.endswith(("_tflop", "_ms", "_gb"))):
        words = key.replace("_tflop", " TFLOP").replace("_gb", " GB").replace("_", " ")
        added = key.endswith("_ms") and key != "forward_ms"
        columns[words.removesuffix(" ms") + " +" if added else words] = key
    for shape, draft, gpu in dict.fromkeys((row["shape"], row["draft_shape"], row["gpu"]) for row in done):
        own = [row for row in done if (row["shape"], row["gpu"]) == (shape, gpu)]
        found.append(f"{shape}, drafts of {draft}, {gpu}:\n\n{of_rows(own, columns)}")
    return "\n\n".join(found)


def pictures(rows: Sequence[Row]) -> dict[str, bytes]:
    """Added time of each system by prompt length, measured and predicted, and the parts of it."""
    measured = [row for row in rows if row["section"] == "ttft" and "extra_ms" in row]
    if not measured:
        return {}
    figure, (left, right) = plots.panels(2, size=(5.5, 4.0))
    for name in dict.fromkeys(row["method"] for row in measured):
        own = [row for row in measured if row["method"] == name]
        figures = [
            {"value": one["median"], "low": one["p10"], "high": one["p90"]}
            for one in (row["extra_ms"] for row in own)
        ]
        plots.points(left, [row["prompt_tokens"] for row in own], figures, name)
        theory = [(row["prompt_tokens"], row["theory_ms"]) for row in own if "theory_ms" in row]
        if theory:
            left.plot(*zip(*theory, strict=True), linestyle=":", color=left.lines[-1].get_color())
    plots.lengths_axis(left, sorted({row["prompt_tokens"] for row in measured}))
    if all(row["extra_ms"]["median"] > 0 for row in measured):
        left.set_yscale("log")
    plots.label(left, "prompt tokens", "added to the first token, ms (dotted: theory)")
    parts = [row for row in rows if row["section"] == "parts" and "scores" in row]
    names = [f"{row['method']}\n{row['prompt_tokens']}" for row in parts]
    base = [0.0] * len(parts)
    for key in ("scores", "selection", "compaction") if parts else ():
        values = [row[key]["ms"]["median"] for row in parts]
        right.bar(names, values, bottom=base, label=key)
        base = [a + b for a, b in zip(base, values, strict=True)]
    plots.label(right, "", "each part alone, ms")
    return {"eviction.png": plots.png(figure)}


BENCH = Bench(
    settings=EvictionCostSettings,
    run=run,
    group="cost",
    report=report,
    pictures=pictures,
    auto={
        "shape": ("llama31_8b", "llama_micro"),
        "draft_shape": ("llama32_1b", "llama_micro"),
        "dtype": ("bfloat16", "float32"),
        "lengths": (["4k", "8k", "16k", "32k"], [256, "1k"]),
        "train_prompts": (["16k", "32k"], [256]),
        "train_response": (512, 64),
        "kernels": ([[32, "8k"], [32, "32k"], [32, "128k"], [512, "16k"]], [[8, 256], [32, 512]]),
    },
)
