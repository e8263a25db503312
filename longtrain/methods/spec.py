"""Defines `MethodSpec`, which describes a method to training, export and inference, and `Objective`.

Shapes: T tokens of one packed sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from longtrain.costs.method import MethodCost
from longtrain.data.packing.batch import Batch

if TYPE_CHECKING:
    from longtrain.data.config import DataConfig
    from longtrain.data.packing.prepared import Prepared
    from longtrain.decoding.roles import Parts
    from longtrain.targets.info import TargetInfo, TargetSketch
    from longtrain.targets.model import Target
    from longtrain.targets.step import OutputRequest


M = TypeVar("M", bound=nn.Module)


def fitted(module: M, target: Target) -> M:
    """Return the module in the target's dtype and on its device; a copy if these differ."""
    weight = next(module.parameters())
    if (weight.dtype, weight.device) == (target.dtype, target.device):
        return module
    return copy.deepcopy(module).to(target.device, target.dtype)


@dataclass(frozen=True)
class Loss:
    """A micro-batch's loss: the *sum* over its labels (or documents), and metrics to log.

    Args:
        total: scalar with a gradient; sum over labels, or over documents with labels if the objective is
            `per_document`. The trainer divides by the optimiser step's global count of them.
        tokens: number of labels in the sum.
        metrics: name -> (sum, count), detached; added over micro-batches and ranks before they are divided.
    """

    total: Tensor
    tokens: int
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Objective(nn.Module):
    """Maps a batch to a loss, with the trained `module` and the frozen `target` (or None).

    The target is kept outside of the tree of modules: nothing that a trainer does to what it trains (moving,
    casting, broadcasting, sharding, saving) affects it.
    """

    module: nn.Module
    target: Target | None

    per_document: bool = False
    """True if a loss sums over documents with labels, and not over labels."""

    reads_top_tokens: bool = False
    """True if `PackedStep.top` can replace the LM head's input (stored features may be lean)."""

    outputs: OutputRequest | None = None
    """What it asks of the target for every batch; None: known only when it runs."""

    asks_target: bool = False
    """True if it also measures the target itself while it trains, which stored features cannot replace."""

    parts: tuple[str, ...] = ()
    """Children of `module` whose gradients are clipped each by its own norm; empty: all by one norm."""

    lr_multipliers: Mapping[str, float] = {}
    """Pattern of parameter names -> factor on the learning rate; `optim.lr_multipliers` has precedence."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep `target` out of the modules."""
        if name == "target":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, batch: Batch) -> Loss:
        """Compute the loss of one micro-batch."""
        raise NotImplementedError


@dataclass(frozen=True)
class DataRun:
    """The facts of a run that a data module needs.

    Args:
        home: folder that holds `data/`.
        max_steps: optimizer steps; None: as many as the data's stages hold.
        accumulate: micro-batches of one rank in an optimizer step.
        world: ranks.
        rank: this rank.
        seed: the seed of the run.
        pin_memory: batches are copied to a CUDA device.
    """

    home: Path
    max_steps: int | None
    accumulate: int
    world: int = 1
    rank: int = 0
    seed: int = 0
    pin_memory: bool = False


@dataclass(frozen=True)
class Imported:
    """A module that was read from another tool's folder.

    Args:
        config: the method's configuration as plain values.
        tensors: the module's state, by name.
        target: the target's facts in the folder; nothing else of the target is compared.
        about: the format and who trained it, for provenance.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: TargetSketch
    about: dict[str, Any]


@dataclass(frozen=True)
class Formats:
    """Other tools' folder formats that a method's modules can be read from or written to.

    Args:
        names: values of `export format=`.
        patterns: file name patterns of such a folder, for downloads.
        reads: folder -> True if it contains a module of this method.
        read: (folder, who trained it or None) -> the module; raises ArtifactError if it is damaged or does
            not state what was trained.
        refuse: (format, config, the target's facts or None) -> None; raises ConfigError for what an engine
            that reads the format would drop silently. Without the facts it checks the settings alone.
        write: (format, tensors, config, target, provenance, the folder's name) -> its files, by their path
            in it; raises ConfigError for what an engine would drop silently.
        verify: (folder, target or None, who trained it or None) -> a line on each thing that was compared;
            raises ArtifactError with all errors. Without the target what depends on it is not compared.
        serves: format -> the engines that read it, for messages.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    reads: Callable[[Path], bool]
    read: Callable[[Path, str | None], Imported]
    refuse: Callable[[str, Any, TargetInfo | None], None]
    write: Callable[[str, Mapping[str, Tensor], Any, Target, dict[str, Any], str], dict[str, bytes]]
    verify: Callable[[Path, Target | None, str | None], list[str]]
    serves: Mapping[str, str] = field(default_factory=dict)


Begin = Callable[[Any, Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor]]
"""(config, tensors of another method's artifact, its configuration) -> the module's initial tensors."""


def _past_window(config: Any) -> int:
    """Return two windows of a draft that has one (a field `window`), else a short prompt's length."""
    return 2 * int(getattr(config, "window", 64))


def _nothing_trained(config: Any, info: TargetInfo | None) -> nn.Module:
    """Return a module without tensors."""
    return nn.Module()


@dataclass(frozen=True)
class MethodSpec:
    """A method: how to build, train and run it.

    Args:
        name: the folder's name, `method=NAME` on the command line.
        config: plain dataclass of hyperparameters (defaults: the paper's), in a module that imports no torch.
        paper: title and arXiv id.
        build: (config, info) -> module with the trainable tensors and nothing else; the default is for
            methods without training.
        objective: (module, target, config) -> Objective; None if nothing is trained.
        attach: (module, target, config, inference keys) -> Parts for the engine; raises TargetMismatchError
            if the module is for another target, ConfigError for a wrong key.
        export: (module, config, folder, provenance) -> None, if the result is not an Artifact (the
            reference target).
        data: (config, keys of `data`, DataRun) -> data module, for a method that makes its own sequences;
            None: documents prepared with the target's tokenizer.
        golden_tokens: config -> prompt length at which every part of the module matters (past its window);
            the golden outputs of an artifact are recorded on a prompt of this length.
        inference_keys: names of the keys that `attach` takes.
        text_settings: config -> settings that decide the text generated on the method's own cache, with a
            draft or without; None if the draft's settings do too. None: it has no cache of its own.
        golden_keys: inference keys with which golden outputs are recorded, if `attach` needs some.
        golden_others: (config, the target's facts) -> inference keys of parts that other machines run in
            place of the golden ones, and whose outputs differ by rounding alone: golden outputs allow for it.
        check_data: (config, the data's config) -> None; raises ConfigError if the two are incompatible.
        check_target: (config, the target's facts) -> None; raises ConfigError if a module with these
            settings can be built for the target but is of no use.
        files: (the module's tensors, config, info) -> further files of the artifact's folder, by their path
            in it: the module in formats of other tools. They are uploaded with it and never read back.
        formats: folders of other tools that it reads and writes; None: there are none.
        elsewhere: another tool -> how it loads the artifact's folder itself, as Markdown for the card;
            `ADDRESS` is replaced by the folder's location, `TARGET` by the target.
        from_data: (a new module, config, the target's facts, prepared data) -> facts for provenance: sets
            what the module takes from the data before it is trained, the same on every rank.
        members: config -> the methods whose modules are children of this one, with their settings, by the
            child's name; each is exported as an artifact of its own. None: the module is one artifact.
        begins: another method -> (config, its artifact's tensors and configuration) -> initial tensors of a
            module, for `init` with an artifact of that method; raises ConfigError if they do not fit.
        cost: memory, operations and bytes of training and decoding, for `plan` and `bench`.
    """

    name: str
    config: type
    paper: str
    build: Callable[[Any, TargetInfo | None], nn.Module] = _nothing_trained
    objective: Callable[[nn.Module, Target | None, Any], Objective] | None = None
    attach: Callable[[nn.Module, Target, Any, dict[str, Any]], Parts] | None = None
    export: Callable[[nn.Module, Any, Path, dict[str, Any]], None] | None = None
    data: Callable[[Any, Mapping[str, Any], DataRun], Any] | None = None
    golden_tokens: Callable[[Any], int] = _past_window
    inference_keys: tuple[str, ...] = ()
    text_settings: Callable[[Any], dict[str, Any] | None] | None = None
    golden_keys: Mapping[str, Any] = field(default_factory=dict)
    golden_others: Callable[[Any, TargetInfo], Sequence[Mapping[str, Any]]] = lambda config, info: ()
    check_data: Callable[[Any, DataConfig], None] | None = None
    check_target: Callable[[Any, TargetInfo], None] | None = None
    files: Callable[[Mapping[str, Tensor], Any, TargetInfo], dict[str, bytes]] | None = None
    formats: Formats | None = None
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    from_data: Callable[[nn.Module, Any, TargetInfo, Prepared], dict[str, Any]] | None = None
    members: Callable[[Any], Mapping[str, tuple[MethodSpec, Any]]] | None = None
    begins: Mapping[str, Begin] = field(default_factory=dict)
    cost: MethodCost = field(default_factory=MethodCost)
