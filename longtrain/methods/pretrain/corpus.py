"""Builds the reference target's corpus (tokenizer and token streams), and the training mixture over it.

Folder: `tokenizer/`, one `<kind>.npy` of ids (uint16) for each kind of running text, `chat.npz`, and
`corpus.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longtrain.data.packing.checks import check_files, sha256_file
from longtrain.data.packing.mixture import Mixture
from longtrain.data.read.files import TEXT_SUFFIXES, find, read_jsonl, read_text, stem
from longtrain.data.retrieval.material import (
    ADJECTIVES,
    NOUNS,
    ChatIds,
    Role,
    RoleDocument,
    TextStream,
)
from longtrain.data.retrieval.synthetic import RetrievalWriter
from longtrain.data.retrieval.wording import PRETRAIN
from longtrain.errors import DataError
from longtrain.files import read_json
from longtrain.folders import FolderKind, finish_replacement, replaced_folder
from longtrain.log import get_logger
from longtrain.methods.pretrain.config import Config
from longtrain.targets.tokenizer import train_tokenizer

log = get_logger(__name__)

CORPUS = FolderKind("a corpus", ("corpus.json",), ("corpus.json", "*.npy", "chat.npz", "tokenizer/*"))
CHUNK_CHARS = 50_000
LONGEST_FILE_CHARS = 60_000
_CALCULATION = re.compile(r"<<[^>]*>>")
_PHRASES = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about them afterwards.\nOne of the special magic numbers for {0} is: 1.\n"
    "What are all the special magic numbers for {0} mentioned in the provided text? "
    "The special magic numbers for {0} mentioned in the provided text are 1. "
    "What is the special magic number for {0}? The special magic number for {0}.\n"
    "Look up 1. Quote the passage that continues after: "
    "Find all variables that are assigned the value 1 in the text above.\n"
)


def build_corpus(
    folder: Path,
    config: Config,
    *,
    books: str,
    code: str | None,
    instruct: str | None,
    held_out: Sequence[str],
) -> None:
    """Train the tokenizer and tokenise what is not held out; does nothing if `folder` is complete.

    Args:
        folder: the folder to write, whole or not at all.
        config: vocabulary size and context.
        books: file or folder of prose (.txt, also .xz or .gz).
        code: file or folder of JSONL with a `text` column, or of source files; None: no code.
        instruct: file or folder of JSONL with question and answer columns; None: no conversations.
        held_out: file stems (books) or starts of file names (code) that are never read for training.

    Raises:
        DataError: nothing left to train on, or a held-out name that matches no file.
    """
    facts: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "held_out": sorted(held_out),
        "sources": _sources(books, code, instruct),
    }
    finish_replacement(folder)
    if (folder / "corpus.json").is_file() and _manifest(folder).get("facts") == facts:
        return
    texts = {"book": list(_texts(books, held_out))}
    if code:
        texts["code"] = list(_texts(code, held_out, limit=LONGEST_FILE_CHARS))
    chats = list(_chats(instruct)) if instruct else []
    seen = {name for names in facts["sources"].values() for name in names}
    for name in held_out:
        if not any(stem(Path(file)).startswith(name) for file in seen):
            raise DataError(
                f"held_out names '{name}', which matches no file of the sources; known: "
                f"{', '.join(sorted(seen)[:6])} ..."
            )
    with replaced_folder(folder, CORPUS) as new:
        train_tokenizer(
            _sample(texts, chats),
            new / "tokenizer",
            size=config.vocab_size,
            max_positions=config.max_positions,
        )
        encode = _bulk_encoder(new / "tokenizer")
        counts = {}
        for kind, documents in texts.items():
            ids_T = _stream(documents, encode)
            np.save(new / f"{kind}.npy", ids_T)
            counts[kind] = len(ids_T)
        ids_T, roles_T, edges = _pack_chats(chats, encode)
        np.savez(new / "chat.npz", ids=ids_T, roles=roles_T, edges=edges)
        hashes = {file.name: sha256_file(file) for file in sorted(new.glob("*.np?"))}
        body = {"facts": facts, "tokens": counts, "chats": len(chats), "sha256": hashes}
        (new / "corpus.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    log.info("corpus=%s tokens=%s chats=%d", folder, counts, len(chats))


def load_mixture(
    folder: Path,
    config: Config,
    *,
    shares: Mapping[str, float],
    stream_weights: Mapping[str, float],
    min_doc_tokens: int = 256,
) -> Mixture:
    """Load the training mixture over a corpus.

    Args:
        folder: a folder that `build_corpus` wrote.
        config: loss weights.
        shares: relative frequency of each kind of document.
        stream_weights: relative frequency of each kind of running text, e.g. `{book: 0.7, code: 0.3}`.
        min_doc_tokens: shortest document.

    Raises:
        DataError: no corpus there.
    """
    if not (folder / "corpus.json").is_file():
        raise DataError(
            f"no corpus at {folder}; run: longtrain prepare +recipe=target_tiny data.books=FOLDER"
        )
    manifest = _manifest(folder)
    tokenizer = _tokenizer(folder / "tokenizer")
    token_text = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]
    kinds = [kind for kind in stream_weights if (folder / f"{kind}.npy").is_file()]
    streams = [TextStream(np.load(folder / f"{kind}.npy", mmap_mode="r"), token_text, kind) for kind in kinds]
    weights = [stream_weights[kind] for kind in kinds]
    writer = RetrievalWriter(
        encoder(folder / "tokenizer"),
        ChatIds((1,), (2,), (3,)),
        streams,
        stream_weights=weights,
        wording=PRETRAIN,
    )
    with np.load(folder / "chat.npz") as arrays:
        edges = arrays["edges"]
        pairs = [(a, b) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
        ids_T, roles_T = arrays["ids"].astype(np.int32), arrays["roles"]
        chats = [RoleDocument(ids_T[a:b], roles_T[a:b], "chat") for a, b in pairs]
    shares = {kind: share for kind, share in shares.items() if kind != "chat" or chats}
    role_weights = (config.text_weight, 0.0, config.answer_weight, config.value_weight)
    return Mixture(
        writer,
        streams,
        chats,
        shares,
        weights,
        min_doc_tokens=min_doc_tokens,
        role_weights=role_weights,
        manifest=manifest,
    )


def _manifest(folder: Path) -> dict[str, Any]:
    """Read a corpus's manifest and verify the files' checksums."""
    again = f"delete {folder} and run longtrain prepare again"
    try:
        manifest = read_json(folder / "corpus.json")
        check_files(folder, manifest.get("sha256"), ("chat.npz",), again=again)
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"the corpus at {folder} is damaged ({error}); {again}") from None
    return dict(manifest)


def encoder(folder: Path) -> Any:
    """Return a function from text to ids of a tokenizer folder, which adds no special tokens."""
    tokenizer = _tokenizer(folder)
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _bulk_encoder(folder: Path) -> Any:
    tokenizer = _tokenizer(folder)

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [
            np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(texts, add_special_tokens=False)
        ]

    return encode


def _sources(books: str, code: str | None, instruct: str | None) -> dict[str, list[str]]:
    files = {"book": find(books, TEXT_SUFFIXES)}
    if code:
        files["code"] = find(code, (".jsonl", *TEXT_SUFFIXES))
    if instruct:
        files["chat"] = find(instruct, (".jsonl",))
    return {kind: [file.name for file in some] for kind, some in files.items()}


def _texts(where: str, held_out: Sequence[str], *, limit: int | None = None) -> Iterator[str]:
    for file in find(where, (".jsonl", *TEXT_SUFFIXES)):
        if any(stem(file).startswith(name) for name in held_out):
            continue
        if ".jsonl" in file.name:
            for _, row in read_jsonl(file):
                text = str(row.get("text", ""))
                if len(text) >= 200 and (limit is None or len(text) <= limit):
                    yield text
        else:
            yield read_text(file)


def _chats(where: str) -> Iterator[tuple[str, str]]:
    """Yield question and answer of each record, by the column names that instruction datasets use."""
    for file in find(where, (".jsonl",)):
        for name, row in read_jsonl(file):
            question = row.get("question") or row.get("instruction")
            answer = row.get("answer") or row.get("output") or row.get("response")
            if not question or not answer:
                raise DataError(
                    f"{name}: no question and answer; known columns: question, instruction, answer, output, "
                    "response"
                )
            extra = row.get("input")
            yield (f"{question}\n{extra}" if extra else str(question)), _CALCULATION.sub("", str(answer))


def _sample(texts: Mapping[str, list[str]], chats: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the tokenizer's training text: a stretch of every document, conversations, the tasks' words."""
    for kind, documents in texts.items():
        most = max(2000, {"book": 10_000_000, "code": 4_000_000}.get(kind, 2_000_000) // len(documents))
        for text in documents:
            middle = max(0, len(text) // 2 - most // 2)
            yield text[middle : middle + most]
    for question, answer in chats[:: max(1, len(chats) // 2000)]:
        yield f"{question}\n{answer}"
    for i in range(2000):
        yield _PHRASES.format(f"{ADJECTIVES[i % len(ADJECTIVES)]}-{NOUNS[i % len(NOUNS)]}")


def _stream(documents: list[str], encode: Any) -> np.ndarray:
    """Return all documents' ids, token 0 after each. Cuts at lines, so that all cores tokenise."""
    chunks: list[str] = []
    for text in documents:
        at = 0
        while len(text) - at > CHUNK_CHARS:
            cut = _line_end(text, at + CHUNK_CHARS)
            chunks.append(text[at:cut])
            at = cut
        chunks += [text[at:], ""]
    parts: list[np.ndarray] = []
    for i in range(0, len(chunks), 1024):
        encoded = encode(chunks[i : i + 1024])
        parts += [
            ids if chunk else np.zeros(1, np.uint16)
            for ids, chunk in zip(encoded, chunks[i : i + 1024], strict=True)
        ]
    return np.concatenate(parts)


def _line_end(text: str, start: int) -> int:
    """Return the place after the next line end that a letter follows: cutting there changes no token."""
    at = start
    while (at := text.find("\n", at) + 1) > 0:
        if at >= len(text) or text[at].isalpha():
            return at
    return len(text)


def _pack_chats(chats: list[tuple[str, str]], encode: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, roles, edges = [np.zeros(0, np.uint16)], [np.zeros(0, np.uint8)], [0]
    questions, answers = encode([q for q, _ in chats]), encode([a for _, a in chats])
    for question, answer in zip(questions, answers, strict=True):
        ids.append(np.concatenate([[1], question, [2], answer, [3]]).astype(np.uint16))
        role = np.full(len(ids[-1]), Role.TEXT, np.uint8)
        role[[0, len(question) + 1]] = Role.PROMPT
        role[len(question) + 2 :] = Role.ANSWER
        roles.append(role)
        edges.append(edges[-1] + len(role))
    return np.concatenate(ids), np.concatenate(roles), np.array(edges, np.int64)
