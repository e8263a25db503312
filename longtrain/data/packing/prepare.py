"""Prepares data for a config and a tokenizer, only if something changed, and renders samples for reading."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from longtrain.data.chat import mask as masks
from longtrain.data.chat.prompts import Answers, Generate, Part
from longtrain.data.chat.tokenise import Tokenise
from longtrain.data.config import DataConfig, SourceConfig
from longtrain.data.packing.again import tokenised_before
from longtrain.data.packing.prepared import PREPARED, Prepared, PreparedWriter, read_manifest
from longtrain.data.read.adapters import WITHOUT_TURNS
from longtrain.data.read.files import need
from longtrain.data.read.manifest import Manifest
from longtrain.data.read.sources import DEFAULT_ADAPTER, Inputs, digest, inputs
from longtrain.data.retrieval.wording import wording_of
from longtrain.errors import ConfigError, DataError
from longtrain.files import lock
from longtrain.folders import finish_replacement, replaced_folder
from longtrain.log import first_of_machine, get_logger

log = get_logger(__name__)

SHOWN_TOKENS = 400
CONTENT = 1
"""Version of the preparation's output; changing it makes all data be prepared again."""
LABEL, READ = "bold green", "dim"


def prepare(
    config: DataConfig,
    tokenizer: Any,
    *,
    home: Path,
    context_tokens: int | None = None,
    vocab_size: int | None = None,
    generate: Generate | None = None,
    author: dict[str, Any] | None = None,
) -> Path:
    """Prepare data for a config and a tokenizer, unless the folder exists and is current.

    Args:
        config: the mixture of sources.
        tokenizer: a Hugging Face tokenizer, the target's own.
        home: parent folder; data goes to `home/data/<name>-<first 8 of the tokenizer's hash>`.
        context_tokens: the target's context: the limit for documents where `max_doc_tokens` is not set.
        vocab_size: tokens that the target has embeddings for; None: as many as the tokenizer has.
        generate: writes answers, for `answers: target`.
        author: what written answers depend on besides the prompt (target, sampling).

    Returns:
        The folder; `Prepared.open` reads it.

    Raises:
        DataError: a source, document or mask is wrong, or nothing is left.
        LongtrainError: `home` cannot be written, or the disk is full; nothing half-written stays.
    """
    token_hash = tokenizer_hash(tokenizer)
    folder = home / "data" / f"{config.name}-{token_hash[:8]}"
    with lock(folder.with_name(f".{folder.name}.lock"), wait=True, read_only=True):
        finish_replacement(folder)
        old = read_manifest(folder) or {}
        if not old and folder.exists():
            log.warning("%s has no manifest that this version reads; it is made again now", folder)
        sources = _chosen(config)
        config = _resolved(config, sources, tokenizer)
        known = _known(old)
        found = [inputs(source, known.get(json.dumps(_plain(source), sort_keys=True))) for source in sources]
        limit = _limit(config, context_tokens)
        wording = wording_of(tokenizer).name
        fingerprint = _fingerprint(config, sources, found, token_hash, limit, author, wording)
        known_ids = _known_ids(tokenizer, vocab_size)
        if old.get("fingerprint") == fingerprint and _is_whole(folder, known_ids):
            log.info("data=%s is current, nothing to do", folder)
            return folder
        answers = Answers(*_written(folder, config, author))
        keys = [_source_key(config, s, i, token_hash, limit) for s, i in zip(sources, found, strict=True)]
        again = tokenised_before(folder, keys, known_ids)
        job = Tokenise(config, tokenizer, limit, generate, answers, known_ids, again)
        with replaced_folder(folder, PREPARED) as temporary:
            writer = PreparedWriter(temporary, known_ids)
            job.write(writer, list(zip(sources, found, strict=True)))
            writer.close(
                {
                    "name": config.name,
                    "fingerprint": fingerprint,
                    "tokenizer_hash": token_hash,
                    "tokenizer": getattr(tokenizer, "name_or_path", ""),
                    "pad_id": _pad_id(tokenizer),
                    "weights": [source.weight for source in sources],
                    "sources": [
                        {"source": _plain(s), "inputs": i}
                        | ({"key": key, "read": job.read[n]} if key and n not in job.held_out.renamed else {})
                        for n, (s, i, key) in enumerate(zip(sources, found, keys, strict=True))
                    ],
                    "read": dict(+job.counts),
                }
            )
        log.info(
            "data=%s documents=%d tokens=%d %s", folder, len(writer.starts), writer.ids.length, job.summary()
        )
        return folder


def answer_part(
    config: DataConfig,
    tokenizer: Any,
    part: Part,
    *,
    home: Path,
    generate: Generate,
    author: dict[str, Any],
    context_tokens: int | None = None,
    vocab_size: int | None = None,
) -> int:
    """Write one part of the target's answers that `prepare` needs; several parts may run at once.

    Args:
        config: the mixture of sources, with `answers: target`.
        tokenizer: as for `prepare`.
        part: number of the part, and of how many.
        home: as for `prepare`.
        generate: writes answers.
        author: what written answers depend on besides the prompt.
        context_tokens: the target's context.
        vocab_size: as for `prepare`.

    Returns:
        The number of answers of other parts that are still missing; at 0 `prepare` writes the data.

    Raises:
        ConfigError: another process writes this part.
        DataError: as for `prepare`.
    """
    config = _resolved(config, _chosen(config), tokenizer)
    folder = home / "data" / f"{config.name}-{tokenizer_hash(tokenizer)[:8]}"
    path, settings = _written(folder, config, author)
    answers = Answers(path, settings, part=part)
    limit, known_ids = _limit(config, context_tokens), _known_ids(tokenizer, vocab_size)
    job = Tokenise(config, tokenizer, limit, generate, answers, known_ids)
    job.answer([(source, inputs(source)) for source in _chosen(config)])
    return len(answers.elsewhere - set(Answers(path, settings).done))


def _resolved(config: DataConfig, sources: list[SourceConfig], tokenizer: Any) -> DataConfig:
    """Return the config with `mask=auto` resolved, refusing an unsuitable chat template before any work."""
    chats = [source for source in sources if _holds_conversations(source)]
    recorded = any(not config.written_by_target(source) for source in chats)
    if config.mask == "auto":
        config = replace(config, mask=masks.usual(tokenizer) if recorded else "template")
        if config.mask == "prefix":
            log.info(
                "data.mask=prefix: the chat template has no generation marks, so answers are found by turns"
            )
    if recorded:
        masks.check_template(tokenizer, config.mask)
    elif chats or any(source.reader == "synthetic" for source in sources):
        masks.check_template(tokenizer, "prefix")
    return config


def _holds_conversations(source: SourceConfig) -> bool:
    """True if a source holds conversations, which the chat template renders."""
    if source.reader == "manifest":
        named = [part.adapter for part in Manifest.load(need(source.where, "manifest")).parts]
    else:
        named = [source.adapter or DEFAULT_ADAPTER.get(source.reader, "text")]
    return not set(named) <= WITHOUT_TURNS


def _known(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of each source in the folder's present manifest."""
    sources = manifest.get("sources") or ()
    return {json.dumps(item["source"], sort_keys=True): item["inputs"] for item in sources}


def _known_ids(tokenizer: Any, vocab_size: int | None) -> int:
    """Return one more than the highest id that both the tokenizer and the target know."""
    highest = max(tokenizer.get_vocab().values(), default=0)
    return highest + 1 if vocab_size is None else min(highest + 1, vocab_size)


def _is_whole(folder: Path, known_ids: int) -> bool:
    """True if a folder holds what was written into it; a damaged one is logged, and is made again.

    One rank of a machine compares all bytes with their hashes.
    """
    try:
        data = Prepared.open(folder, verify=first_of_machine())
        if first_of_machine():
            data.refuse_ids_above(known_ids)
    except DataError as error:
        log.warning("%s; it is made again now", str(error).partition("; prepare again")[0])
        return False
    return True


def _written(folder: Path, config: DataConfig, author: dict[str, Any] | None) -> tuple[Path, dict[str, Any]]:
    """Return the file of the target's answers beside a prepared folder, and the settings they depend on."""
    settings = {**(author or {}), "answer_tokens": config.answer_tokens}
    return folder.with_name(f"{folder.name}.answers.jsonl"), settings


def _limit(config: DataConfig, context_tokens: int | None) -> int | None:
    """Return the most tokens of a document; None if longer documents are split."""
    if config.long_documents == "split" and not config.asks_target and not config.prompt_tokens:
        return None
    return config.max_doc_tokens or context_tokens


def _chosen(config: DataConfig) -> list[SourceConfig]:
    """Return the sources that have a path."""
    sources = [source for source in config.sources if source.where or not source.optional]
    if not sources:
        raise ConfigError(f"no source of data '{config.name}' has a path; pass e.g. data.text=PATH")
    return sources


def samples(data: Prepared, tokenizer: Any, count: int, *, seed: int = 0) -> Iterator[Any]:
    """Yield `count` documents spread over the text kinds, as `rich.text.Text` with the labels highlighted.

    Args:
        data: prepared data.
        tokenizer: the tokenizer of the data.
        count: number of documents.
        seed: seed of the choice.
    """
    from rich.text import Text

    order = np.random.default_rng(seed).permutation(len(data.start))
    rank = np.empty(len(order), np.int64)
    for kind in np.unique(data.kind):
        mine = order[data.kind[order] == kind]
        rank[mine] = np.arange(len(mine))
    for doc in order[np.argsort(rank[order], kind="stable")][:count].tolist():
        ids, mask = _stretch(data, doc)
        head = f"{data.names[doc]} ({data.kinds[data.kind[doc]]}, {'val' if data.val[doc] else 'train'}): "
        share = f"{data.labels[doc]} labels of {data.length[doc]} tokens"
        text = Text(head + share + "\n", style="bold")
        if len(ids) < data.length[doc]:
            text.append("[...]", style=READ)
        for token, label in zip(ids.tolist(), mask.tolist(), strict=True):
            piece = tokenizer.decode([token], skip_special_tokens=False)
            text.append(piece.replace("\n", "⏎\n") if label else piece, style=LABEL if label else READ)
        yield text


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the hex sha256 of everything that decides how a tokenizer encodes text and conversations."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    values = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    body = json.dumps({**values, "truncation": None, "padding": None}, sort_keys=True)
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(f"{body}\n{json.dumps(template)}".encode()).hexdigest()


def _fingerprint(
    config: DataConfig,
    sources: list[SourceConfig],
    found: list[Inputs],
    token_hash: str,
    limit: int | None,
    author: dict[str, Any] | None,
    wording: str,
) -> str:
    """Return a hash of everything the prepared files depend on, which excludes the location of local files.

    `wording` is that of synthetic questions, and counts only where there are some.
    """
    content = {key: value for key, value in config.content().items() if key != "sources"}
    plain = [{k: v for k, v in _plain(s).items() if k not in ("where", "optional")} for s in sources]
    asked = wording if any(s.reader == "synthetic" for s in sources) else None
    parts = [plain, asked, [digest(item) for item in found], content, token_hash, limit]
    written = author if config.asks_target else None
    return hashlib.sha256(json.dumps([CONTENT, *parts, written], sort_keys=True).encode()).hexdigest()


def _source_key(
    config: DataConfig, source: SourceConfig, found: Inputs, token_hash: str, limit: int | None
) -> str | None:
    """Return a hash of all that a source's tokens and labels depend on, other sources and passes excluded.

    None if other sources are written into its text, or the target answers it, neither of which is kept with
    it, or if a file could not be read.
    """
    unread = any(not file["sha256"] for file in found.get("files", ()))
    synthetic = any(one.reader == "synthetic" for one in config.sources)
    if unread or synthetic or config.written_by_target(source):
        return None
    return _fingerprint(config, [replace(source, weight=1.0)], [found], token_hash, limit, None, "")


def _plain(source: SourceConfig) -> dict[str, Any]:
    return dict(vars(source))


def _pad_id(tokenizer: Any) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


def _stretch(data: Prepared, doc: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a document's ids and mask, at most `SHOWN_TOKENS` around the start of its last answer."""
    start, length = int(data.start[doc]), int(data.length[doc])
    mask = np.asarray(data.mask[start : start + length])
    edges = np.flatnonzero(np.diff(mask.astype(np.int8)) == 1)
    middle = int(edges[-1]) if len(edges) else SHOWN_TOKENS // 2
    begin = max(0, min(middle - SHOWN_TOKENS // 2, length - SHOWN_TOKENS))
    end = min(length, begin + SHOWN_TOKENS)
    return np.asarray(data.ids[start + begin : start + end]), mask[begin:end]
