"""The suites of `longtrain bench`, and the interface that each implements.

A suite is a module with a constant `BENCH`; the job reads its settings, runs it, stores its rows and displays
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
    """A request for an excerpt of a held-out document, at a place chosen by the seed.

    Args:
        length: tokens of the prompt, including special tokens that the tokenizer puts first.
        after: tokens of the document after the prompt.
        text: a file or folder; None: the bundled text.
        kinds: text kinds to use; empty: all.
        seed: seed of the choice.
    """

    length: int
    after: int
    text: str | None = None
    kinds: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Context:
    """The parts of the configuration that a suite may use besides its own keys.

    Args:
        device: the device to measure on.
        seed: seed of weights, tokens and sampling.
        dtype: `target.dtype`.
        method: the keys of `method`, with its name; None: no method is chosen.
        artifact: name or folder of the `artifact`; None: there is none.
        reading: `evict.budget_tokens` and the keys of `select` that are set, without the group's name.
        home: the folder in which artifacts are looked up.
        sampling: sampling settings of `decode`.
        drafting: returns the tree shape of `decode`, or the shapes to choose among.
        target_shape: returns the shape of the configured target: a name of `targets.shapes.SHAPES`, or the
            keys of its config.json; None: no target is configured.
        lookup: `decode.lookup`.
        load_target: loads the configured target; its argument is the default for `target.path`.
        held_out: returns the tokens of a held-out excerpt, the prompt and the text after it; for None, of all
            the bundled text.
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
    lookup: str = "off"
    load_target: Callable[[str | None], Target] | None = None
    held_out: Callable[[Target, HeldOutWanted | None], Sequence[int]] | None = None

    @property
    def cuda(self) -> bool:
        """True if the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def gpu(self) -> Gpu | None:
        """The device's data sheet; None for a CPU or an unknown GPU."""
        return gpu_called(torch.cuda.get_device_name(self.device)) if self.cuda else None

    @property
    def device_name(self) -> str:
        """CUDA's name of the device, or `CPU`."""
        return torch.cuda.get_device_name(self.device) if self.cuda else "CPU"

    def random_target(self, shape: str | Mapping[str, Any], *, dtype: str | None = None) -> Target:
        """Build a target with random weights on the device.

        Args:
            shape: a name of `targets.shapes.SHAPES`, or the keys of a `config.json`.
            dtype: dtype of its weights; None: `target.dtype`.
        """
        keys = shape if isinstance(shape, str) else dict(shape)
        target = random_target(keys, seed=self.seed, dtype=dtype or self.dtype, device=self.device)
        return target.fuse() if self.cuda else target

    def load(self, name: str) -> Artifact:
        """Load an artifact by name or folder.

        Raises:
            ArtifactError: there is no such artifact.
        """
        return Artifact.load(name, home=self.home)

    def entries(self, values: Sequence[Any], key: str = "suite.systems") -> list[Entry]:
        """Parse systems as typed; checks that their names are distinct and their artifacts exist.

        Args:
            values: entries in the grammar of `longtrain.systems`.
            key: the key of the entries, for messages.

        Raises:
            ArtifactError: there is no such artifact.
            ConfigError: an entry is wrong, or two have the same name.
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
        """Build the systems of an entry, one for each budget; untrained methods have random weights.

        Args:
            target: the model.
            entry: the entry.
            budgets: KV entries kept, for systems that evict.
            roles: allowed roles of the systems, and who uses them (`Builder.of`).
        """
        shapes = (TreeShape((1,)),)  # default of entries without a shape; suites choose their own
        builder = Builder(target, budgets, shapes, self.load, random_seed=self.seed)
        return builder.of(entry, **roles)


@dataclass(frozen=True)
class Auto:
    """Annotation of a key with the values that `auto` stands for.

    Args:
        on_cuda: the value on a GPU.
        elsewhere: the value on a CPU.
    """

    on_cuda: Any
    elsewhere: Any


Dtype = Annotated[Literal["bfloat16", "float16", "float32"], Auto("bfloat16", "float32")]
"""Dtype of a random target or of an operator's inputs."""


@dataclass(frozen=True)
class Bench:
    """A suite of `longtrain bench`.

    Args:
        settings: a dataclass whose fields are the suite's keys, with annotations for `longtrain.settings`,
            and `Auto` for keys that may be `auto`.
        run: measures, and yields rows as they are ready. Errors in the settings are raised before the first.
        columns: heading -> key of a row, for the table; a dotted key looks into a nested mapping.
        report: returns the Markdown report, if it is more than one table of all rows.
        pictures: returns file name -> PNG.
    """

    settings: type
    run: Callable[[Any, Context], Iterator[Row]]
    columns: Mapping[str, str] = field(default_factory=dict)
    report: Callable[[Sequence[Row], Any, Context], str] | None = None
    pictures: Callable[[Sequence[Row]], dict[str, bytes]] | None = None

    def read(self, suite: Mapping[str, Any], context: Context) -> Any:
        """Read the suite's settings; `auto` is resolved by the configured target and the device.

        Raises:
            ConfigError: a key is unknown, or its value is not allowed.
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
        """Return the rows as Markdown."""
        return self.report(rows, settings, context) if self.report else of_rows(rows, self.columns)


def bench_of(name: str) -> Bench:
    """Return the suite of a name.

    Raises:
        ConfigError: there is no such suite.
    """
    if name not in SUITES:
        raise ConfigError(f"bench has no suite '{name}'; known: {', '.join(SUITES)}")
    found: Bench = importlib.import_module(SUITES[name]).BENCH
    return found


def random_ids(vocab_size: int, batch: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids, for random weights."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch, length), generator=rng).tolist()


def brief(row: Mapping[str, Any]) -> str:
    """Format a row in one line, with the medians of repeated measurements."""
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
    """Required keys of a shape given as a mapping, besides those of its `model_type`."""

    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    hidden_size: Count
    intermediate_size: Count
    vocab_size: Count
    head_dim: Count | None = None


def shape_keys(shape: str | Mapping[str, Any], key: str = "suite.shape") -> dict[str, Any]:
    """Return a shape as the keys of a `config.json`.

    Args:
        shape: a name of `targets.shapes.SHAPES`, or such keys.
        key: the key of the shape, for messages.

    Raises:
        ConfigError: the name is unknown, or a size is missing or invalid.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ConfigError(f"{key}={shape}; known: {', '.join(SHAPES)}")
        return dict(SHAPES[shape])
    read(ShapeKeys, shape, key, ignore=shape)
    if Sizes.of_keys(shape).head_dim < 1:
        raise ConfigError(f"{key}={shape} leaves heads of size 0; add head_dim, or raise hidden_size")
    return dict(shape)
