"""Loads the target for training, or its stored features instead (`features=online|fill|offline`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError, DataError
from longtrain.jobs.setup import load_target
from longtrain.log import get_logger

if TYPE_CHECKING:
    from longtrain.config import TargetConfig
    from longtrain.features.forms import Form
    from longtrain.features.settings import FeatureSettings
    from longtrain.features.shards import FeatureFiles
    from longtrain.methods.spec import Objective
    from longtrain.targets.model import Target

log = get_logger(__name__)


def form_of(settings: FeatureSettings) -> Form:
    """The storage form of features: from the settings, else from the folder.

    Raises:
        DataError: the folder's description of its form is damaged.
    """
    from longtrain.features import identity
    from longtrain.features.forms import Form

    there = identity.read(Path(str(settings.folder)))
    usual = Form() if there is None else there.form
    return Form(settings.form or usual.form, usual.top_k if settings.top_k is None else settings.top_k)


def check_filled(settings: FeatureSettings) -> None:
    """Refuse to read features from a folder without features.

    Raises:
        ConfigError: features=offline or engine, and the folder has none.
        DataError: the folder's description of its target and data is damaged.
    """
    from longtrain.features import identity

    settings.check_states()
    if settings.mode == "offline" and identity.read(Path(str(settings.folder))) is None:
        raise ConfigError(f"features.folder={settings.folder} holds none; fill it first: features=fill")


def load_for_training(asked: TargetConfig, settings: FeatureSettings, *, seed: int, device: str) -> Target:
    """Load the target, without its layers if all features are stored.

    Args:
        asked: the group `target`.
        settings: the group `features`.
        seed: the seed of random weights.
        device: the device of this rank.

    Raises:
        ConfigError: no target is chosen, or no features are stored.
    """
    offline = settings.without_layers and bool(asked.path)
    if offline:
        check_filled(settings)
    return load_target(asked, seed=seed, device=device, fuse=not offline, training=True, layers=not offline)


@dataclass
class Stored:
    """The target of a training run, or the `StoredTarget` in its place.

    Args:
        target: the target itself, or a `StoredTarget` that stores and reads its outputs.
        shards: the feature files; None: nothing is stored.
    """

    target: Any
    shards: FeatureFiles | None = None

    @property
    def lean(self) -> str | None:
        """The source of features if it changes what is trained on: an engine, or a form coarser than bf16."""
        from longtrain.features.engine import EngineStates
        from longtrain.features.forms import Form

        if isinstance(self.shards, EngineStates):
            return "features=engine"
        return None if self.shards is None or self.target.form == Form() else str(self.target.form)

    def follow(self, objective: Objective) -> None:
        """Check that the stored features suffice for an objective, then hook it so that each batch's features
        are found.

        Raises:
            ConfigError: only the most likely tokens are stored and the objective reads hidden states; or it
                runs the target, whose layers are not loaded; or see `EngineStates.expect`.
            DataError: a file of an engine is damaged, or of another form.
        """
        from longtrain.features.engine import EngineStates

        if self.shards is None:
            return
        if isinstance(self.shards, EngineStates):
            self.shards.expect(objective.outputs)
        top_k = self.target.form.top_k
        if top_k and not objective.reads_top_tokens:
            raise ConfigError(
                f"features.top_k={top_k} keeps no hidden states, and this method reads them; pass "
                "features.top_k=0"
            )
        if objective.asks_target and not self.target.compute:
            raise ConfigError(
                "this method measures the target itself in training, and features=offline loads no layers; "
                "switch that measurement off (a guard_every of 0, say) or pass features=fill"
            )
        self.target.follow(objective)

    def close(self) -> None:
        """Flush buffered features to disk.

        Raises:
            LongtrainError: the disk is full.
        """
        if self.shards is not None:
            self.shards.close()
            message = "features documents=%d tokens=%d mib=%.1f folder=%s"
            size = self.shards.size_bytes() / 2**20
            log.info(message, len(self.shards), self.shards.tokens(), size, self.shards.folder)


def stored(
    settings: FeatureSettings, target: Target | None, *, data: tuple[Any, Any], rank: int = 0
) -> Stored:
    """Open the stored features of a run.

    Args:
        settings: the group `features`.
        target: the result of `load_for_training`; None: the method trains without a target.
        data: the data's name and its hash (`data.sha256`).
        rank: the rank of this process.

    Raises:
        ConfigError: the folder has features of another target, data or form, or another run is writing to it.
        DataError: an index in the folder is damaged.
        LongtrainError: the disk is full.
    """
    if settings.mode == "online" or target is None:
        return Stored(target)
    from longtrain.features import identity
    from longtrain.features.engine import EngineStates
    from longtrain.features.forms import Form
    from longtrain.features.shards import MIB, FeatureFiles
    from longtrain.features.target import StoredTarget

    folder, fill = Path(str(settings.folder)), settings.mode == "fill"
    if settings.mode == "engine":
        states = EngineStates(folder, target, settings.layer_ids)
        return Stored(StoredTarget(target, states, Form(), compute=False), states)
    there, form = identity.read(folder), form_of(settings)
    name, rows = data
    mine = identity.Identity(
        target.info.name, target.info.weights_hash, str(name), identity.hash_of(rows), form
    )
    if there is not None:
        mine.check(folder, there)
    shards = FeatureFiles(folder, rank=rank, shard_bytes=settings.shard_mib * MIB)
    if fill:
        shards.claim()
        if rank == 0:
            mine.write(folder)
            _take_dump(settings, shards, target, form)
    log.info("features=%s documents=%d %s folder=%s", settings.mode, len(shards), form, folder)
    return Stored(StoredTarget(target, shards, form, compute=fill), shards)


def _take_dump(settings: FeatureSettings, shards: FeatureFiles, target: Target, form: Form) -> None:
    """Import features that another trainer dumped, if the settings name a folder of such files."""
    if settings.dump is None:
        return
    from longtrain.features import dumps

    tokens = dumps.take(Path(settings.dump), shards, target, form=form, layers=settings.dump_layers)
    log.info("features.dump=%s tokens=%d documents=%d", settings.dump, tokens, len(shards))


def check_stored(kept: Stored, data: Any, *, steps: int, validates: bool) -> None:
    """Refuse a run with `features=offline` if any document that it will read is not stored, before it begins.

    Args:
        kept: the run's stored features.
        data: the run's data module.
        steps: the run's optimizer steps.
        validates: True if held-out sequences are read too.

    Raises:
        DataError: documents are missing; the message gives their number and the first one's name.
    """
    from longtrain.data.packing.module import DataModule

    if kept.shards is None or kept.target.compute or not isinstance(data, DataModule):
        return
    wants = kept.shards.wants("row")
    if len(wants) != 1:
        return  # the first sequence raises the error
    import numpy as np
    import torch

    from longtrain.features.engine import EngineStates
    from longtrain.features.target import row_key

    plan = data.plan
    spans = [plan.pieces.take(np.arange(plan.row_ptr[steps * plan.sequences_per_step]))]
    if validates and data.val_dataloader():  # [] if there are fewer sequences than ranks
        spans.append(data.val_plan.pieces)
    pieces = {(a, n): doc for one in spans for a, n, doc in zip(one.start, one.length, one.doc, strict=True)}
    (asked,) = wants
    missing, first_T = [], None
    for (start, length), doc in pieces.items():
        ids_T = torch.from_numpy(data.data.ids[start : start + length].astype(np.int64))
        key = row_key(ids_T, asked)
        if key not in kept.shards:
            first_T = ids_T if first_T is None else first_T
            missing.append(f"of document {data.data.names[doc]} ({length} tokens)")
        elif isinstance(kept.shards, EngineStates):
            mask_T = torch.from_numpy(data.data.mask[start : start + length].astype(bool))
            kept.shards.check_mask(key, mask_T, data.data.names[doc])
    if first_T is not None:
        near = kept.shards.near(first_T)
        raise DataError(
            f"features in {kept.shards.folder} lack {len(missing)} of {len(pieces)} pieces of documents, the "
            f"first {missing[0]}{near and f' ({near})'}; {kept.shards.remedy()}"
        )
