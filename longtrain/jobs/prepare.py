"""Turn manifests or your own files into tokenised data, checked and kept until an input changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain import provenance
from longtrain.data.config import DataConfig
from longtrain.data.rows.prepare import LABEL, READ, answer_part, prepare, samples
from longtrain.data.rows.prepared import Prepared
from longtrain.errors import ConfigError
from longtrain.jobs.setup import load_target_from, plain, target_overrides
from longtrain.log import get_logger
from longtrain.settings import Count, convert, wrong
from longtrain.targets.tokenizer import embedded_tokens, read_tokenizer

if TYPE_CHECKING:
    from longtrain.data.chat.prompts import Generate, Part
    from longtrain.targets.model import Target

log = get_logger(__name__)

NO_TOKENIZER = (
    "text cannot be prepared without a tokenizer; use a target folder that has one (tokenizer.json)"
)

MARKS = ("⟦", "⟧")
"""Around labels, where a sample is shown without colours."""


def run(cfg: DictConfig) -> None:
    """Prepare `cfg.data` for the target's tokenizer, and show samples if `cfg.show` says how many.

    Raises:
        ConfigError: no data or target is chosen.
        DataError: a source, row or mask is wrong, or the disk is full.
    """
    config, part = data_config(cfg), _part(cfg)
    if part is not None and not config.asks_target:
        raise ConfigError(
            f"shards={part[1]} splits the answers that the target writes (data.answers=target), and data "
            f"'{config.name}' has none; leave shards and shard out"
        )
    if config.asks_target:
        target = load_target_from(cfg)
        tokenizer = target.tokenizer
        if part is not None and (missing := _write_part(cfg, config, target, part)):
            log.info("part=%d of %d done; other parts lack answers=%d", *part, missing)
            return
        folder = ensure_prepared(cfg, tokenizer, context_tokens=target.info.max_positions, target=target)
    else:
        tokenizer, context_tokens = read_tokenizer(_target_path(cfg), **target_overrides(cfg))
        folder = ensure_prepared(
            cfg, tokenizer, context_tokens=context_tokens, vocab_size=embedded_tokens(_target_path(cfg))
        )
    facts = {"folder": str(folder), "sha256": Prepared.open(folder).manifest["sha256"]}
    provenance.write(Path(cfg.run_dir) / "prepare", plain(cfg), data=facts)
    show(folder, tokenizer, count=int(cfg.get("show") or 0), seed=int(cfg.seed))


def check(cfg: DictConfig) -> None:
    """Refuse data and targets that are not chosen; reads nothing.

    Raises:
        ConfigError: no data or target is chosen, or a key or value of the data is wrong.
    """
    data_config(cfg)
    _target_path(cfg)


def ensure_prepared(
    cfg: DictConfig,
    tokenizer: Any,
    *,
    context_tokens: int | None = None,
    vocab_size: int | None = None,
    target: Target | None = None,
) -> Path:
    """The prepared folder of `cfg.data`, made now if it is missing or out of date.

    Args:
        cfg: the resolved configuration.
        tokenizer: the target's.
        context_tokens: the target's context; documents beyond it are treated as `data.long_documents` says.
        vocab_size: tokens that the target has embeddings for; None: those of `target`, or of the tokenizer.
        target: writes the answers where `data.answers=target`.

    Raises:
        ConfigError: no data is chosen, or the target has no tokenizer.
        DataError: see `longtrain.data.rows.prepare.prepare`.
    """
    config = data_config(cfg)
    if tokenizer is None:
        raise ConfigError(NO_TOKENIZER)
    author = None
    generate = None
    if config.asks_target and target is not None:
        author = _author(target)
        generate = _writer(config, target)
    return prepare(
        config,
        tokenizer,
        home=Path(cfg.home),
        context_tokens=context_tokens,
        vocab_size=vocab_size if target is None else target.info.vocab_size,
        generate=generate,
        author=author,
    )


def data_config(cfg: DictConfig) -> DataConfig:
    """`cfg.data`, checked.

    Raises:
        ConfigError: no data is chosen, or a key or value of it is wrong.
    """
    values = plain(cfg.get("data"))
    if not isinstance(values, Mapping):
        raise ConfigError("no data is chosen (data=null); pass data=NAME, e.g. data=text data.text=PATH")
    return DataConfig.parse(values)


def show(folder: Path, tokenizer: Any, *, count: int, seed: int) -> None:
    """Print samples with their labels coloured, or in brackets where there are no colours."""
    if count < 1:
        return
    from rich.console import Console

    console = Console()
    marks = ("", "") if console.color_system else MARKS
    console.print(f"{marks[0]}[{LABEL}]label, to be predicted[/]{marks[1]}, [{READ}]read only[/]")
    for sample in samples(Prepared.open(folder), tokenizer, count, seed=seed, marks=marks):
        console.rule()
        console.print(sample)


def _part(cfg: DictConfig) -> Part | None:
    """Which part of the answers `shard` and `shards` ask for; None: all of them.

    Raises:
        ConfigError: a part that there is not.
    """
    shards, shard = convert(cfg.shards, Count, "shards"), convert(cfg.shard, int | None, "shard")
    if shard is None:
        return None
    if not 0 <= shard < shards:
        raise wrong("shard", f"{shard} shards={shards}", f"0 to {shards - 1}, or null (all)")
    return shard, shards


def _write_part(cfg: DictConfig, config: DataConfig, target: Target, part: Part) -> int:
    """Write one part of the answers; how many of the others' are missing."""
    if target.tokenizer is None:
        raise ConfigError(NO_TOKENIZER)
    return answer_part(
        config,
        target.tokenizer,
        part,
        home=Path(cfg.home),
        generate=_writer(config, target),
        author=_author(target),
        context_tokens=target.info.max_positions,
        vocab_size=target.info.vocab_size,
    )


def _author(target: Target) -> dict[str, Any]:
    """What the target's answers depend on besides the prompt."""
    from longtrain.decoding.sampling import Sampling

    return {"target": target.info.name, "weights": target.info.weights_hash, **asdict(Sampling())}


def _target_path(cfg: DictConfig) -> str:
    if not cfg.target.path:
        raise ConfigError(
            "no target is chosen, and data is made for its tokenizer; pass target=NAME or target.path=FOLDER"
        )
    return str(cfg.target.path)


def _writer(config: DataConfig, target: Target) -> Generate:
    """The target's own answers: greedy, by the engine without a draft, up to and with its end mark."""
    from longtrain.decoding.engine import Engine
    from longtrain.decoding.limits import Limits

    engine = Engine(target, limits=Limits(batch=config.answer_batch))

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        return engine.generate(prompts, max_new_tokens=config.answer_tokens).tokens

    return generate
