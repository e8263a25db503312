"""The suites of `longtrain bench`, and what each of them says about itself.

A suite is a module with a constant `BENCH`; the job reads its settings, runs it, keeps its rows and shows
them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import torch

from longtrain.artifact import Artifact
from longtrain.costs.hardware import Gpu, gpu_called
from longtrain.costs.model import Sizes
from longtrain.decoding.control import ShapeChoice
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError
from longtrain.settings import AUTO, Count, read
from longtrain.systems import Builder, Entry, System, parse
from longtrain.systems.system import check_methods
from longtrain.tables import of_rows
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.targets.shapes import SHAPES

SUITES = {
    "draft_memory": "longtrain.bench.training",
    "engine": "longtrain.bench.engine",
    "first_token": "longtrain.bench.first_token",
    "training": "longtrain.bench.training",
}
"""`suite=NAME` -> the module that holds its `BENCH`; `benchmarks` of a checkout adds its own."""

Row = dict[str, Any]
"""One measurement; its keys are those of the JSON file."""


@dataclass(frozen=True)
class HeldOutWanted:
    """A stretch of one held-out document, at a place that the seed chooses.

    Args:
        length: tokens of a prompt, with those that the tokenizer puts before a text.
        after: tokens of the document behind the prompt.
        text: a file or folder; None: what ships here.
        kinds: the kinds of text to take from it; empty: all.
        seed: the seed of the choice.
    """

    length: int
    after: int
    text: str | None = None
    kinds: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Context:
    """What a suite may know of the command line beside its own keys.

    Args:
        device: the device to measure on.
        seed: the seed of weights, tokens and coins.
        dtype: `target.dtype`.
        method: the keys of `method`, its name among them; None where no method is chosen.
        artifact: the name or folder of `artifact`; None where there is none.
        reading: `evict.budget_tokens` and the keys of `select` that are set, by name without the group.
        home: the folder that artifacts are looked up in.
        sampling: how tokens are drawn, as `decode` says.
        drafting: gives the shape, or the shapes to choose among, that `decode` says.
        target_shape: gives the shape of the target that `target` names: one of `targets.shapes.SHAPES`, or
            the keys of its config.json; None where no target is named.
        load_target: gives the target that `target` names; its argument is taken where `target.path` is not
            set.
        held_out: gives the tokens of a stretch of held-out text, a prompt and what follows it; for None
            those of all the text that ships here.
    """

    device: torch.device
    seed: int = 0
    dtype: str = AUTO
    method: Mapping[str, Any] | None = None
    artifact: str | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)
    home: Path = Path()
    sampling: Sampling = field(default_factory=Sampling)
    drafting: Callable[[], TreeShape | ShapeChoice] = lambda: TreeShape(())
    target_shape: Callable[[], str | Mapping[str, Any] | None] = lambda: None
    load_target: Callable[[str | None], Target] | None = None
    held_out: Callable[[Target, HeldOutWanted | None], Sequence[int]] | None = None

    @property
    def cuda(self) -> bool:
        """Whether a GPU is measured."""
        return self.device.type == "cuda"

    @property
    def gpu(self) -> Gpu | None:
        """The data sheet of the device; None for a CPU and for an unknown GPU."""
        return gpu_called(torch.cuda.get_device_name(self.device)) if self.cuda else None

    @property
    def device_name(self) -> str:
        """What CUDA calls the device, or `CPU`."""
        return torch.cuda.get_device_name(self.device) if self.cuda else "CPU"

    def random_target(
        self, shape: str | Mapping[str, Any], *, dtype: str | None = None, fused: bool = True
    ) -> Target:
        """A target with random weights on the device.

        Args:
            shape: a name of `targets.shapes.SHAPES`, or the keys of a `config.json`.
            dtype: of its weights; None: `target.dtype`.
            fused: whether its decoding layers are joined on CUDA, as in generation.
        """
        keys = shape if isinstance(shape, str) else dict(shape)
        target = random_target(keys, seed=self.seed, dtype=dtype or self.dtype, device=self.device)
        return target.fuse() if fused and self.cuda else target

    def load(self, name: str) -> Artifact:
        """An artifact by its name or folder.

        Raises:
            ArtifactError: there is no such artifact.
        """
        return Artifact.load(name, home=self.home)

    def entries(self, values: Sequence[Any], key: str = "suite.systems") -> list[Entry]:
        """Systems as they were typed, each with another name, and what they name is there.

        Args:
            values: entries of the grammar of `longtrain.systems`.
            key: the key that they were given with, for messages.

        Raises:
            ArtifactError: there is no such artifact.
            ConfigError: an entry is wrong, or two have one name.
        """
        found = [parse(value) for value in values]
        check_methods(found, key)
        for name in (name for entry in found for name in entry.artifacts):
            self.load(name)
        names = [entry.called() for entry in found]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{key} has two systems named {twice[0]}; give one of them a `label`")
        return found

    def systems(
        self, target: Target, entry: Entry, *, budgets: Sequence[Budget] = (), **roles: Any
    ) -> list[System]:
        """What an entry stands for, once a budget; a method that would have to be trained has random weights.

        Args:
            target: the model.
            entry: a system.
            budgets: rows kept, for systems that evict.
            roles: what systems may bring, and who takes them (`Builder.of`).
        """
        shapes = (TreeShape((1,)),)  # of drafts whose entry names none; suites choose their own
        builder = Builder(target, budgets, shapes, self.load, random_seed=self.seed)
        return builder.of(entry, **roles)


@dataclass(frozen=True)
class Auto:
    """What `auto` stands for; it stands in the annotation of a key beside what else is allowed.

    Args:
        on_cuda: the value where a GPU is measured.
        elsewhere: the value where a CPU is measured.
    """

    on_cuda: Any
    elsewhere: Any


Dtype = Annotated[Literal["bfloat16", "float16", "float32"], Auto("bfloat16", "float32")]
"""The type of a random target's or an operator's numbers."""


@dataclass(frozen=True)
class Bench:
    """A suite of `longtrain bench`.

    Args:
        settings: a dataclass whose fields are the suite's keys, with annotations for `longtrain.settings` and
            `Auto` where a key may be `auto`.
        run: measures; rows come as they are ready. What is wrong in the settings is told before the first.
        columns: heading -> key of a row, for the table; a dotted key reaches into a mapping.
        report: what is shown and written as Markdown, where it is more than one table of all rows.
        pictures: gives PNGs by the names of their files.
    """

    settings: type
    run: Callable[[Any, Context], Iterator[Row]]
    columns: Mapping[str, str] = field(default_factory=dict)
    report: Callable[[Sequence[Row], Any, Context], str] | None = None
    pictures: Callable[[Sequence[Row]], dict[str, bytes]] | None = None

    def read(self, suite: Mapping[str, Any], context: Context) -> Any:
        """The suite's settings, `auto` settled by the target that is named and by the device.

        Raises:
            ConfigError: a key is not known, or its value is not allowed.
        """
        values = dict(suite)
        for key, kind in get_type_hints(self.settings, include_extras=True).items():
            for note in getattr(kind, "__metadata__", ()):
                if isinstance(note, Auto) and values.get(key) == AUTO:
                    own = context.target_shape() if key == "shape" else None
                    if isinstance(own, Mapping) and get_args(kind)[0] is str:
                        raise ConfigError(
                            f"suite={suite.get('name')} measures published shapes, and the named target has "
                            f"none of them; pass suite.shape= with one of: {', '.join(SHAPES)}"
                        )
                    values[key] = own or (note.on_cuda if context.cuda else note.elsewhere)
        return read(self.settings, values, "suite", ignore=("name",))

    def table(self, rows: Sequence[Row], settings: Any, context: Context) -> str:
        """The rows for people, in Markdown."""
        return self.report(rows, settings, context) if self.report else of_rows(rows, self.columns)


def bench_of(name: str) -> Bench:
    """The suite of a name.

    Raises:
        ConfigError: there is no such suite.
    """
    if name not in SUITES:
        raise ConfigError(f"bench has no suite '{name}'; known: {', '.join(SUITES)}")
    found: Bench = importlib.import_module(SUITES[name]).BENCH
    return found


def brief(row: Mapping[str, Any]) -> str:
    """A row's numbers and names in one line: medians of what was measured more than once."""
    words = []
    for key, value in row.items():
        if isinstance(value, dict):
            within = value.get("ms", value)
            value = within.get("median") if isinstance(within, dict) else within
        if isinstance(value, int | float | str):
            words.append(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}")
    return " ".join(words)


@dataclass(frozen=True)
class ShapeKeys:
    """What a shape given as a mapping must have, beside the keys that its `model_type` knows."""

    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    hidden_size: Count
    intermediate_size: Count
    vocab_size: Count
    head_dim: Count | None = None


def shape_keys(shape: str | Mapping[str, Any], key: str = "suite.shape") -> dict[str, Any]:
    """A shape as the keys of a `config.json`.

    Args:
        shape: a name of `targets.shapes.SHAPES`, or such keys.
        key: the key that it was given with, for messages.

    Raises:
        ConfigError: no such name, or a mapping in which a size is missing or is none.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ConfigError(f"{key}={shape}; known: {', '.join(SHAPES)}")
        return dict(SHAPES[shape])
    read(ShapeKeys, shape, key, ignore=shape)
    if Sizes.of_keys(shape).head_dim < 1:
        raise ConfigError(f"{key}={shape} leaves heads of size 0; add head_dim, or raise hidden_size")
    return dict(shape)
