"""`longtrain prepare`: tokenise corpora or the user's own files; the result is reused until an
input changes.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longtrain import provenance
from longtrain.data.packing.pack import cut
from longtrain.data.packing.prepare import LABEL, READ, answer_part, prepare, samples
from longtrain.data.packing.prepared import Prepared
from longtrain.errors import ConfigError
from longtrain.files import cannot_write
from longtrain.jobs.setup import load_target
from longtrain.log import get_logger
from longtrain.targets.tokenizer import embedded_tokens, read_tokenizer

if TYPE_CHECKING:
    from rich.text import Text

    from longtrain.config import RunConfig
    from longtrain.data.chat.prompts import Generate, Part
    from longtrain.data.config import DataConfig
    from longtrain.targets.model import Target

log = get_logger(__name__)

OPEN, CLOSE = "⟦", "⟧"
"""Markers around labels on terminals without colours."""
NO_TOKENIZER = (
    "text cannot be prepared without a tokenizer; use a target folder that has one (tokenizer.json)"
)


def run(cfg: RunConfig) -> None:
    """Prepare `cfg.data` for the target's tokenizer; write its rows and print samples if asked.

    Raises:
        ConfigError: no data or target is chosen.
        DataError: a source, example or mask is wrong, or the disk is full.
    """
    config, shard = cfg.data, cfg.prepare.part()
    part = None if shard is None else (shard, cfg.prepare.shards)
    if part is not None and not config.asks_target:
        raise ConfigError(
            f"shards={part[1]} splits the answers that the target writes (data.answers=target), and data "
            f"'{config.name}' has none; leave shards and shard out"
        )
    if config.asks_target:
        target = load_target(cfg.target, seed=cfg.seed)
        tokenizer = target.tokenizer
        if part is not None and (missing := _write_part(config, target, part, home=cfg.home)):
            log.info("part=%d of %d done; other parts lack answers=%d", *part, missing)
            return
        context = target.info.max_positions
        folder = ensure_prepared(config, tokenizer, home=cfg.home, context_tokens=context, target=target)
    else:
        where = _target_path(cfg)
        tokenizer, context_tokens = read_tokenizer(where, **cfg.target.overrides)
        folder = ensure_prepared(
            config,
            tokenizer,
            home=cfg.home,
            context_tokens=context_tokens,
            vocab_size=embedded_tokens(where),
        )
    facts = {"folder": str(folder), "sha256": Prepared.open(folder).manifest["sha256"]}
    provenance.write(cfg.run_dir / "prepare", cfg.values, data=facts)
    if cfg.prepare.rows is not None:
        count = write_rows(Prepared.open(folder), config, Path(cfg.prepare.rows).expanduser())
        log.info("rows=%s documents=%d", cfg.prepare.rows, count)
    show(folder, tokenizer, count=cfg.prepare.show or 0, seed=cfg.seed)


def check(cfg: RunConfig) -> None:
    """Refuse missing data or a missing target; reads nothing.

    Raises:
        ConfigError: no data or target is chosen, or a key or value of the data is wrong.
    """
    _ = cfg.data
    _target_path(cfg)


def ensure_prepared(
    config: DataConfig,
    tokenizer: Any,
    *,
    home: Path,
    context_tokens: int | None = None,
    vocab_size: int | None = None,
    target: Target | None = None,
) -> Path:
    """Return the prepared folder of the group `data`, preparing it first if it is missing or out of date.

    Args:
        config: the group `data`.
        tokenizer: the target's.
        home: the folder that holds `data`.
        context_tokens: the target's context length; longer documents are handled according to
            `data.long_documents`.
        vocab_size: number of the target's embeddings; None: that of `target`, or of the tokenizer.
        target: generates the answers if `data.answers=target`.

    Raises:
        ConfigError: the target has no tokenizer.
        DataError: see `longtrain.data.packing.prepare.prepare`.
    """
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
        home=home,
        context_tokens=context_tokens,
        vocab_size=vocab_size if target is None else target.info.vocab_size,
        generate=generate,
        author=author,
    )


def write_rows(data: Prepared, config: DataConfig, path: Path) -> int:
    """Write the pieces of documents that training reads as JSON lines `input_ids`, `loss_mask`; count them.

    The file appears whole or not at all; `prepare-data` of speculators and the adapter `tokenised` read it.

    Raises:
        ConfigError: a stage cuts documents at other places in each epoch.
        LongtrainError: the disk is full or not writable.
    """
    docs, spans = np.arange(len(data.length)), dict[tuple[int, int], None]()
    for stage in config.stages:
        if stage.recut and (data.length > stage.doc_tokens).any():
            raise ConfigError(
                f"rows={path}: a stage cuts documents of up to {int(data.length.max())} tokens at other "
                "places in each epoch; pass recut: false in data.stages, or doc_tokens of that size"
            )
        pieces = cut(
            data, docs, doc_tokens=stage.doc_tokens, phase=0 * docs, min_tokens=config.min_doc_tokens
        )
        spans |= dict.fromkeys(zip(pieces.start.tolist(), pieces.length.tolist(), strict=True))
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="ascii") as file:
            for start, length in spans:
                here = slice(start, start + length)
                row = {"input_ids": data.ids[here].tolist(), "loss_mask": data.mask[here].tolist()}
                file.write(json.dumps(row) + "\n")
        part.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        part.unlink(missing_ok=True)
    return len(spans)


def show(folder: Path, tokenizer: Any, *, count: int, seed: int) -> None:
    """Print samples with coloured labels, or with markers around labels if there are no colours."""
    if count < 1:
        return
    from rich.console import Console

    console = Console()
    coloured = console.is_terminal and not console.no_color
    if coloured:
        console.print(f"[{LABEL}]label, to be predicted[/], [{READ}]read only[/]")
    else:
        console.print(f"{OPEN}label, to be predicted{CLOSE}, read only", markup=False)
    for sample in samples(Prepared.open(folder), tokenizer, count, seed=seed):
        console.rule()
        console.print(sample if coloured else marked(sample), markup=False, highlight=False)


def marked(sample: Text) -> str:
    """A sample as text in which each stretch of labels is between `OPEN` and `CLOSE`."""
    parts, done, inside = [], 0, False
    for span in sample.spans:
        if inside != (span.style == LABEL):
            parts += [sample.plain[done : span.start], CLOSE if inside else OPEN]
            done, inside = span.start, not inside
    return "".join([*parts, sample.plain[done:], CLOSE if inside else ""])


def _write_part(config: DataConfig, target: Target, part: Part, *, home: Path) -> int:
    """Generate one part of the answers; returns the number of missing answers of the other parts."""
    if target.tokenizer is None:
        raise ConfigError(NO_TOKENIZER)
    return answer_part(
        config,
        target.tokenizer,
        part,
        home=home,
        generate=_writer(config, target),
        author=_author(target),
        context_tokens=target.info.max_positions,
        vocab_size=target.info.vocab_size,
    )


def _author(target: Target) -> dict[str, Any]:
    """JSON values that determine the target's answers, besides the prompt."""
    from longtrain.decoding.sampling import Sampling

    return {"target": target.info.name, "weights": target.info.weights_hash, **asdict(Sampling())}


def _target_path(cfg: RunConfig) -> str:
    if not cfg.target.path:
        raise ConfigError(
            "no target is chosen, and data is made for its tokenizer; pass target=NAME or target.path=FOLDER"
        )
    return cfg.target.path


def _writer(config: DataConfig, target: Target) -> Generate:
    """A function that generates the target's own answers: greedy, without a draft, including the
    end token.
    """
    from longtrain.decoding.engine import Engine
    from longtrain.decoding.limits import Limits

    engine = Engine(target, limits=Limits(batch=config.answer_batch))

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        return engine.generate(prompts, max_new_tokens=config.answer_tokens).tokens

    return generate
