"""Prepared data for a config and a tokenizer: made once, and made again only when something changed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longtrain.data.config import DataConfig, SourceConfig
from longtrain.data.rows.prepared import FORMAT, Writer, read_manifest, replacing, unusable
from longtrain.data.chat.respond import Answers, Generate
from longtrain.data.read.sources import Inputs, digest, inputs
from longtrain.data.chat.tokenise import ANSWERS, Bar, Tokenise
from longtrain.errors import ConfigError
from longtrain.log import get_logger

log = get_logger(__name__)

LOG_EVERY_S = 60.0


def prepare(
    config: DataConfig,
    tokenizer: Any,
    *,
    home: Path,
    context_tokens: int | None = None,
    generate: Generate | None = None,
    author: dict[str, Any] | None = None,
    progress: bool = True,
) -> Path:
    """Prepared data for a config and a tokenizer, made if it is not there or no longer current.

    Args:
        config: the mixture.
        tokenizer: a Hugging Face tokenizer, the target's own.
        home: data goes to `home/data/<name>-<first 8 of the tokenizer's hash>`.
        context_tokens: the target's context: the limit for documents where `max_doc_tokens` is not set.
        generate: writes answers, for `answers: target`.
        author: what written answers depend on besides the prompt (target, sampling).
        progress: show a bar on a terminal.

    Returns:
        The folder; `Prepared.open` reads it.

    Raises:
        DataError: a source, row or mask is wrong, nothing is left, `home` cannot be written, or the disk is
            full; nothing half-written stays.
    """
    token_hash = tokenizer_hash(tokenizer)
    folder = home / "data" / f"{config.name}-{token_hash[:8]}"
    with _locked(folder):
        old = read_manifest(folder) or {}
        sources = [source for source in config.sources if source.where or not source.optional]
        if not sources:
            raise ConfigError(f"no source of data '{config.name}' has a path; pass e.g. data.text=PATH")
        known = {
            json.dumps(item["source"], sort_keys=True): item["inputs"] for item in old.get("sources", ())
        }
        found = [inputs(source, known.get(json.dumps(_plain(source), sort_keys=True))) for source in sources]
        limit = config.max_doc_tokens or context_tokens
        if config.long_documents == "split" and not config.asks_target and not config.prompt_tokens:
            limit = None
        fingerprint = _fingerprint(config, sources, found, token_hash, limit, author)
        if old.get("fingerprint") == fingerprint:
            log.info("data=%s is current, nothing to do", folder)
            return folder
        settings = {**(author or {}), "answer_tokens": config.answer_tokens}
        answers = Answers(folder.with_name(f"{folder.name}.answers.jsonl"), settings)
        job = Tokenise(config, tokenizer, limit, generate, answers)
        with replacing(folder) as temporary, _bar(progress) as bar:
            writer = Writer(temporary, max(len(tokenizer), 1))
            job.write(writer, list(zip(sources, found, strict=True)), bar)
            writer.close(
                {
                    "name": config.name,
                    "fingerprint": fingerprint,
                    "tokenizer_hash": token_hash,
                    "tokenizer": getattr(tokenizer, "name_or_path", ""),
                    "pad_id": _pad_id(tokenizer),
                    "weights": [source.weight for source in sources],
                    "sources": [
                        {"source": _plain(s), "inputs": i} for s, i in zip(sources, found, strict=True)
                    ],
                    "read": dict(job.counts),
                }
            )
        log.info(
            "data=%s documents=%d tokens=%d %s", folder, len(writer.starts), writer.ids.length, job.summary()
        )
        return folder


def tokenizer_hash(tokenizer: Any) -> str:
    """Hex sha256 of what a tokenizer does to text and conversations."""
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
) -> str:
    """A hash of everything the prepared files depend on; where local files are is not part of it."""
    content = {key: value for key, value in config.content().items() if key != "sources"}
    plain = [{k: v for k, v in _plain(s).items() if k not in ("where", "optional")} for s in sources]
    parts = [plain, [digest(item) for item in found], content, token_hash, limit]
    written = author if config.asks_target else None
    return hashlib.sha256(json.dumps([FORMAT, *parts, written], sort_keys=True).encode()).hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time: other ranks wait, and then find the data there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(f".{folder.name}.lock").open("w")
    except OSError as error:
        raise unusable(folder, error) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _bar(show: bool) -> Iterator[Bar]:
    """A function that shows how far a stream is: a bar on a terminal, a log line a minute elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeLeft(),
    )
    terminal = show and console.is_terminal
    with Progress(*columns, console=console, disable=not terminal) as bar:

        def follow(stream: Iterable[Any], what: str, total: int | None = None) -> Iterator[Any]:
            task, started_s = bar.add_task(what, total=total), time.monotonic()
            told_s = started_s
            for done, item in enumerate(stream, 1):
                yield item
                bar.update(task, completed=done)
                now_s = time.monotonic()
                if not terminal and total and now_s - told_s > LOG_EVERY_S:
                    left_s = (now_s - started_s) / done * (total - done)
                    log.info("%s done=%d of=%d left_s=%.0f", what, done, total, left_s)
                    told_s = now_s
            if what == ANSWERS:
                bar.remove_task(task)

        yield follow


def _plain(source: SourceConfig) -> dict[str, Any]:
    return dict(vars(source))


def _pad_id(tokenizer: Any) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0
