"""The `MethodSpec` of pretraining: how to build, train and run it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from longtrain.data.config import PackingStage
from longtrain.data.packing.module import MixtureModule, check_context
from longtrain.errors import ArtifactError, ConfigError
from longtrain.methods.pretrain.card import card
from longtrain.methods.pretrain.config import Config
from longtrain.methods.pretrain.corpus import build_corpus, load_mixture
from longtrain.methods.pretrain.objective import Pretrained, PretrainObjective
from longtrain.methods.spec import DataRun, MethodSpec
from longtrain.targets.bundle import save_bundle
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target

KEYS = (
    "name",
    "books",
    "code",
    "instruct",
    "held_out",
    "shares",
    "stream_weights",
    "min_doc_tokens",
    "stages",
    "workers",
)
"""Keys of `data` that this method reads."""
LARGEST_BYTES = 10 * 2**20


def rows(config: Config, data: Mapping[str, Any], about: DataRun) -> MixtureModule:
    """Return the data module; the corpus is made if it is missing or its sources have changed.

    Args:
        config: the method's settings.
        data: the resolved `data` group, with the keys `KEYS`.
        about: the run; the corpus is `home/data/<data.name>`.

    Raises:
        ConfigError: an unknown key, no books, or no `trainer.max_steps`.
    """
    unknown = sorted(set(data) - set(KEYS))
    if unknown:
        raise ConfigError(f"unknown key data.{unknown[0]} for method=pretrain; known: {', '.join(KEYS)}")
    if not data.get("books"):
        raise ConfigError(
            "data.books is not set; pass data.books=FOLDER of plain-text books (.txt, .txt.xz or .txt.gz)"
        )
    if about.max_steps is None:
        raise ConfigError(
            "method=pretrain needs trainer.max_steps: its sequences are made on the fly and never end"
        )
    folder = about.home / "data" / str(data["name"])
    sources = {key: data.get(key) or None for key in ("code", "instruct")}
    build_corpus(
        folder, config, books=str(data["books"]), held_out=list(data.get("held_out") or ()), **sources
    )
    mixture = load_mixture(
        folder,
        config,
        shares=data["shares"],
        stream_weights=data["stream_weights"],
        min_doc_tokens=int(data["min_doc_tokens"]),
    )
    stages = [PackingStage(**values) for values in data["stages"]]
    check_context(stages, config.max_positions)
    return MixtureModule(
        mixture,
        stages,
        total_steps=about.max_steps,
        accumulate=about.accumulate,
        seed=about.seed,
        workers=min(int(data.get("workers") or 0), max(1, (os.cpu_count() or 1) - 1)),
        pin_memory=about.pin_memory,
        world=about.world,
        rank=about.rank,
    )


def _build(config: Config, info: TargetInfo | None) -> nn.Module:
    return Pretrained(config)


def _objective(module: nn.Module, target: Target | None, config: Config) -> PretrainObjective:
    if not isinstance(module, Pretrained):
        raise ConfigError(f"method=pretrain trains its own model, not {type(module).__name__}")
    return PretrainObjective(module, config)


def _export(module: nn.Module, config: Config, folder: Path, facts: dict[str, Any]) -> None:
    """Write the target folder: int8 weights (per row), tokenizer, config, and a card."""
    if not isinstance(module, Pretrained):
        raise ConfigError(f"method=pretrain exports its own model, not {type(module).__name__}")
    if not config.tokenizer:
        raise ConfigError(
            "method.tokenizer is not set; pass the tokenizer folder beside the corpus: data/NAME/tokenizer"
        )
    size = save_bundle(module.llama, Path(config.tokenizer), folder)
    text = card(config, name=folder.name, licence=facts.get("license"))
    (folder / "README.md").write_text(text, encoding="utf-8")
    if size > LARGEST_BYTES and config == Config(tokenizer=config.tokenizer):
        raise ArtifactError(f"{folder} has {size} bytes; the bundled target may have {LARGEST_BYTES}")


SPEC = MethodSpec(
    name="pretrain",
    config=Config,
    paper="none: next-token prediction over real text with retrieval tasks written into it",
    build=_build,
    objective=_objective,
    export=_export,
    data=rows,
)
