"""Which target a training run loads and what stands in its place, as `features` says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError, DataError
from longtrain.features.settings import FeatureSettings
from longtrain.jobs.setup import load_target_from, plain
from longtrain.log import get_logger
from longtrain.settings import read

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from longtrain.features.forms import Form
    from longtrain.features.shards import FeatureFiles
    from longtrain.methods.spec import Objective
    from longtrain.targets.model import Target

log = get_logger(__name__)


def settings_of(cfg: DictConfig) -> FeatureSettings:
    """`cfg.features`, checked.

    Raises:
        ConfigError: a key or value is wrong.
    """
    settings = read(FeatureSettings, plain(cfg.features) if cfg.get("features") else {}, "features")
    if settings.mode != "online" and settings.folder is None:
        raise ConfigError(f"features={settings.mode} needs a folder; pass features.folder=FOLDER")
    return settings


def form_of(settings: FeatureSettings) -> Form:
    """How features are stored: as the settings say, and where they do not, as the folder has them.

    Raises:
        DataError: what says how they are stored is damaged.
    """
    from longtrain.features import identity
    from longtrain.features.forms import Form

    there = identity.read(Path(str(settings.folder)))
    usual = Form() if there is None else there.form
    return Form(settings.form or usual.form, usual.top_k if settings.top_k is None else settings.top_k)


def check_filled(settings: FeatureSettings) -> None:
    """Refuse to read features from a folder that holds none.

    Raises:
        ConfigError: it holds none, and features=offline.
        DataError: what says whose they are is damaged.
    """
    from longtrain.features import identity

    if settings.mode == "offline" and identity.read(Path(str(settings.folder))) is None:
        raise ConfigError(f"features.folder={settings.folder} holds none; fill it first: features=fill")


def load_for_training(cfg: DictConfig, settings: FeatureSettings, *, device: str) -> Target:
    """The target, without its layers where all features are stored.

    Raises:
        ConfigError: no target is chosen, or there are no features to read.
    """
    offline = settings.mode == "offline" and bool(cfg.target and cfg.target.path)
    if offline:
        check_filled(settings)
    return load_target_from(cfg, device=device, fuse=not offline, training=True, layers=not offline)


@dataclass
class Stored:
    """What stands in the target's place while a method trains.

    Args:
        target: the target itself, or a stand-in that stores and reads what it gives.
        shards: where that is; None: nothing is stored.
    """

    target: Any
    shards: FeatureFiles | None = None

    @property
    def lean(self) -> str | None:
        """The form, where it keeps less than bf16 does and so changes what is trained on; else None."""
        from longtrain.features.forms import Form

        return None if self.shards is None or self.target.form == Form() else str(self.target.form)

    def follow(self, objective: Objective) -> None:
        """Let the stand-in see the batches of an objective, if that can do with what is stored.

        Raises:
            ConfigError: the law's likeliest tokens are stored, and the objective reads hidden states; or it
                asks the target, whose layers are not loaded.
        """
        if self.shards is None:
            return
        top_k = self.target.form.top_k
        if top_k and not objective.reads_top_law:
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
        """Write what is not on the disk yet.

        Raises:
            LongtrainError: the disk is full.
        """
        if self.shards is not None:
            self.shards.close()
            said = "features documents=%d tokens=%d mib=%.1f folder=%s"
            size = self.shards.size_bytes() / 2**20
            log.info(said, len(self.shards), self.shards.tokens(), size, self.shards.folder)


def stored(
    settings: FeatureSettings, target: Target | None, *, data: tuple[Any, Any], rank: int = 0
) -> Stored:
    """Open the stored features of a run.

    Args:
        settings: of `features`.
        target: what `load_for_training` gave; None: the method trains without one.
        data: its name, and what `data.sha256` says it is.
        rank: this process.

    Raises:
        ConfigError: the folder's features are of another target, data or form, or another run writes them.
        DataError: an index in it is damaged.
        LongtrainError: the disk is full.
    """
    if settings.mode == "online" or target is None:
        return Stored(target)
    from longtrain.features import identity
    from longtrain.features.shards import MIB, FeatureFiles
    from longtrain.features.target import StoredTarget

    folder, fill = Path(str(settings.folder)), settings.mode == "fill"
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
    """Store what another trainer dumped, if the settings name such a folder."""
    if settings.dump is None:
        return
    from longtrain.features import dumps

    tokens = dumps.take(Path(settings.dump), shards, target, form=form, layers=settings.dump_layers)
    log.info("features.dump=%s tokens=%d documents=%d", settings.dump, tokens, len(shards))


def check_stored(kept: Stored, data: Any, *, steps: int, validates: bool) -> None:
    """Refuse a run of `features=offline` that would meet documents which are not stored, before it begins.

    Args:
        kept: the run's features.
        data: its data module.
        steps: its optimizer steps.
        validates: whether it reads held-out rows too.

    Raises:
        DataError: some are missing; the message says how many, and names the first.
    """
    from longtrain.data.rows.module import DataModule

    if kept.shards is None or kept.target.compute or not isinstance(data, DataModule):
        return
    wants = kept.shards.wants("row")
    if len(wants) != 1:
        return  # the first row says what is wrong
    import numpy as np
    import torch

    from longtrain.features.target import row_key

    plan = data.plan
    spans = [plan.pieces.take(np.arange(plan.row_ptr[steps * plan.rows_per_step]))]
    if validates and (rows := data.val_dataloader()):
        spans.append(rows.dataset.plan.pieces)  # type: ignore[union-attr]
    pieces = {(a, n): doc for one in spans for a, n, doc in zip(one.start, one.length, one.doc, strict=True)}
    (asked,) = wants
    missing = []
    for (start, length), doc in pieces.items():
        ids_T = torch.from_numpy(data.data.ids[start : start + length].astype(np.int64))
        if row_key(ids_T, asked) not in kept.shards:
            missing.append(f"of document {data.data.names[doc]} ({length} tokens)")
    if missing:
        raise DataError(
            f"features in {kept.shards.folder} lack {len(missing)} of {len(pieces)} pieces of documents, the "
            f"first {missing[0]}; fill them with the same settings and features=fill (and recut: false in "
            "data.stages, so that each epoch cuts documents alike)"
        )
