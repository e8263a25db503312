"""Row adapters, which turn a corpus's row into documents; manifests and configs refer to them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from longtrain.errors import ConfigError, DataError

Row = Mapping[str, Any]
Columns = Mapping[str, str]
Message = dict[str, str]
"""A turn: `role`, `content`, and optionally `question`, the end of the content that asks about the rest."""

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
CALLS = ("tool_calls", "function_call")
"""Keys of turns that hold assistant output besides the content, which each template formats differently."""
TURNS = ("conversations", "messages", "conversation")
PROMPTS = ("prompt", "instruction", "question", "problem", "query")
ANSWERS = ("response", "answer", "output", "completion", "solution", "qwq")

PERMISSIVE = {"mit", "bsd-2-clause", "bsd-3-clause", "apache-2.0", "isc", "unlicense", "cc0-1.0"}


@dataclass(frozen=True)
class Document:
    """One document of a corpus: exactly one of text, messages and ids.

    Args:
        name: its name in error messages.
        kind: text kind (book, code, chat, ...).
        text: running text; every token is a label.
        messages: turns with `role` (system, user, assistant) and `content`; the assistant's are labels.
        ids_T: token ids.
        mask_T: given with `ids_T`; True where the token is a label.
        val: True if held out; None: decided by `val_fraction`.
        group: documents of one group are held out together; empty: each is drawn by its name.
    """

    name: str
    kind: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    ids_T: np.ndarray | None = None
    mask_T: np.ndarray | None = None
    val: bool | None = None
    group: str = ""


def adapt(
    adapter: str, row: Row, columns: Columns, *, name: str, kind: str, answered: bool = True
) -> list[Document]:
    """Return the documents of one row.

    Args:
        adapter: a key of `ADAPTERS`.
        row: a row of the corpus.
        columns: adapter column -> corpus column, where the names differ.
        name: the name of the row.
        kind: text kind; empty: the adapter's own.
        answered: False if the answer is not needed: a row without one then has an empty answer.

    Raises:
        ConfigError: no such adapter.
        DataError: a column is missing, or holds a value of the wrong type.
    """
    if adapter not in ADAPTERS:
        raise ConfigError(f"unknown row adapter '{adapter}'; known: {', '.join(sorted(ADAPTERS))}")
    if not answered and all(row.get(key) is None for key in ANSWERS):
        row = {**row, "response": ""}
    return [
        Document(**{**vars(doc), "name": name if i == 0 else f"{name}/{i}", "kind": kind or doc.kind})
        for i, doc in enumerate(ADAPTERS[adapter](row, columns, name))
    ]


def messages_of(turns: Any, name: str) -> tuple[Message, ...]:
    """Convert turns of either common form, `role`/`content` or `from`/`value`, to messages.

    Raises:
        DataError: not a list of turns, or an unknown role.
    """
    if not isinstance(turns, Iterable) or isinstance(turns, str | Mapping):
        raise DataError(
            f"row {name}: the conversation is a {type(turns).__name__}; a list of turns is wanted"
        )
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise DataError(f"row {name}: a turn is a {type(turn).__name__}; role and content are wanted")
        role, content = (turn.get("role", turn.get("from")), turn.get("content", turn.get("value")))
        content = _joined(content)
        if called := [key for key in CALLS if turn.get(key)]:
            raise DataError(
                f"row {name}: a turn of {role} with {called[0]}, which is not read, so the labels would lack "
                "the call; write it into the content"
            )
        if role not in ROLES or not isinstance(content, str):
            raise DataError(
                f"row {name}: turn with role {role!r} and {type(content).__name__} content; "
                f"allowed roles: {', '.join(ROLES)}; content must be text, or a list of texts"
            )
        messages.append({"role": ROLES[role], "content": content})
    return tuple(messages)


def _joined(content: Any) -> Any:
    """Join a list of strings, or of `{type: text, text: ...}`, to one string; return other content as is."""
    if not isinstance(content, list | tuple):
        return content
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else content


def _column(row: Row, columns: Columns, key: str, name: str, *others: str, instead: str = "") -> Any:
    names = (columns.get(key, key), *(() if key in columns else others))
    for column in names:
        if row.get(column) is not None:
            return row[column]
    if empty := [column for column in names if column in row]:
        raise DataError(f"row {name}: its column '{empty[0]}' is null; drop the row")
    raise DataError(
        f"row {name} has no column '{columns.get(key, key)}'; it has: {', '.join(row)}; "
        f"set columns: {{{key}: NAME}} for this source{instead}"
    )


def _ask(prompt: str, answer: str, kind: str, question: str = "") -> list[Document]:
    """Return a conversation of one question; `question` is the end of the prompt, if it can be separated."""
    asked = {"role": "user", "content": prompt, **({"question": question} if question else {})}
    messages = (asked, {"role": "assistant", "content": answer})
    return [Document("", kind, messages=messages)]


def _text(row: Row, columns: Columns, name: str) -> list[Document]:
    """Read a text column; a list of texts is joined by blank lines."""
    text = _column(row, columns, "text", name, "content")
    return [Document("", "text", text="\n\n".join(map(str, text)) if isinstance(text, list) else str(text))]


def _permissive_code(row: Row, columns: Columns, name: str) -> list[Document]:
    """Read source files with a permissive licence in the licence column; skip others."""
    if str(_column(row, columns, "license", name)).lower() not in PERMISSIVE:
        return []
    return [Document("", "code", text=str(_column(row, columns, "text", name)))]


def _conversation(row: Row, columns: Columns, name: str) -> list[Document]:
    """Read turns from one column, or a prompt and a response from two."""
    own = {key: columns[key] for key in ("prompt", "conversations") if key in columns}
    asked = next((row[key] for key in (own.get("prompt"), *PROMPTS) if key and row.get(key)), None)
    if asked is not None and not any(row.get(key) for key in (own.get("conversations"), *TURNS) if key):
        turns_in_one = ", or {conversations: NAME} for turns in one column"
        answer = _column(row, columns, "response", name, *ANSWERS, instead=turns_in_one)
        if isinstance(asked, str) and isinstance(answer, str):
            return _instruct(row, columns, name)
        turns = [*_turns(asked, "user"), *_turns(answer, "assistant")]
    else:
        instead = ", or {prompt: NAME, response: NAME} for questions and answers in two columns"
        turns = _column(row, columns, "conversations", name, *TURNS, instead=instead)
    return [Document("", "chat", messages=messages_of(turns, name))]


def _turns(value: Any, role: str) -> list[Any]:
    """Return a list of turns; a string becomes one turn of the given role."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _list(value)


def _tokenised(row: Row, columns: Columns, name: str) -> list[Document]:
    ids = np.asarray(_column(row, columns, "input_ids", name), np.int64)
    column = row.get(columns.get("loss_mask", "loss_mask"))
    mask = np.ones(len(ids), bool) if column is None else np.asarray(column).astype(bool)
    if ids.ndim != 1 or mask.shape != ids.shape:
        raise DataError(
            f"row {name}: input_ids {ids.shape} and loss_mask {mask.shape}; one list each, equally long"
        )
    return [Document("", "tokens", ids_T=ids, mask_T=mask)]


def _packed_tokens(row: Row, columns: Columns, name: str) -> list[Document]:
    """Read tokenised rows of several documents: `indices` holds (begin, end) of each."""
    ids = np.asarray(_column(row, columns, "input_ids", name), np.int64)
    spans = np.asarray(_column(row, columns, "indices", name), np.int64).reshape(-1, 2)
    kind = str(row.get("domain") or "text")
    return [
        Document("", kind, ids_T=ids[begin:end], mask_T=np.ones(end - begin, bool))
        for begin, end in spans.tolist()
        if end - begin > 1
    ]


def _instruct(row: Row, columns: Columns, name: str) -> list[Document]:
    prompt = str(_column(row, columns, "prompt", name, *PROMPTS))
    answer = str(_column(row, columns, "response", name, *ANSWERS))
    extra = str(row.get(columns.get("input", "input")) or "").strip()
    return _ask(f"{prompt}\n\n{extra}" if extra else prompt, answer, "instruct")


def _chatqa_long(row: Row, columns: Columns, name: str) -> list[Document]:
    """Read a document and a question from one column, formatted as a plain-text dialogue."""
    text = str(_column(row, columns, "question", name)).strip()
    text = text.removeprefix("User:").removesuffix("Assistant:").strip()
    answer = _list(_column(row, columns, "answer", name, "answers"))
    asked = text.rpartition("\n\n")[2]
    return _ask(text, str(answer[0]) if answer else "", "long_qa", asked if len(asked) <= 1000 else "")


def _gov_report(row: Row, columns: Columns, name: str) -> list[Document]:
    report, summary = (str(_column(row, columns, key, name)) for key in ("report", "summary"))
    ask = "Write a one-page summary of the following report by a government agency."
    return _ask(f"{ask}\n\nReport:\n{report}\n\n{ask}", summary, "summary", ask)


def _multi_news(row: Row, columns: Columns, name: str) -> list[Document]:
    news, summary = (str(_column(row, columns, key, name)) for key in ("document", "summary"))
    news = news.replace("NEWLINE_CHAR", "\n").replace("|||||", "\n\n")
    ask = "Write a one-page summary of all of the following news."
    return _ask(f"{ask}\n\nNews:\n{news.strip()}\n\n{ask}", summary.removeprefix("–").strip(), "summary", ask)


def _meetingbank(row: Row, columns: Columns, name: str) -> list[Document]:
    transcript, summary = (str(_column(row, columns, key, name)) for key in ("transcript", "summary"))
    ask = "Write a summary of the following meeting transcript."
    return _ask(f"{ask}\n\nTranscript:\n{transcript}\n\n{ask}", summary, "summary", ask)


def _code_completion(row: Row, columns: Columns, name: str) -> list[Document]:
    prefix, suffix = (
        str(_column(row, columns, key, name, other))
        for key, other in (("prefix", "context"), ("suffix", "gt"))
    )
    return _ask(
        f"Complete the following code.\n\n{prefix}\n\nGo on from where the code ends.", suffix, "code"
    )


def _longspec_long(row: Row, columns: Columns, name: str) -> list[Document]:
    """Read LongSpec's long-stage data: code and books as text, papers with question and abstract, chats."""
    source = str(_column(row, columns, "source", name))
    if source in ("code", "book"):
        return [Document("", source, text=str(_column(row, columns, "text", name)))]
    if source == "arxiv":
        articles, abstracts = (_list(_column(row, columns, key, name)) for key in ("article", "abstract"))
        turns: list[Message] = []
        for article, abstract in zip(articles, abstracts, strict=False):
            turns.append({"role": "user", "content": f"Please summarize the following article: {article}"})
            turns.append({"role": "assistant", "content": str(abstract)})
        return [Document("", "paper", messages=tuple(turns))] if turns else []
    if source == "tulu-v2":
        return [Document("", "chat", messages=messages_of(_column(row, columns, "conversation", name), name))]
    raise DataError(f"row {name}: source '{source}'; known: code, book, arxiv, tulu-v2")


def _longspec_sft(row: Row, columns: Columns, name: str) -> list[Document]:
    """Read LongSpec's fine-tuning data: three kinds of summaries, and code completion."""
    source = str(_column(row, columns, "source", name))
    parts = {
        "gov-report": _gov_report,
        "multi-news": _multi_news,
        "meetingbank": _meetingbank,
        "code": _code_completion,
    }
    if source not in parts:
        raise DataError(f"row {name}: source '{source}'; known: {', '.join(parts)}")
    return parts[source](row, columns, name)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


ADAPTERS: dict[str, Callable[[Row, Columns, str], list[Document]]] = {
    "text": _text,
    "permissive_code": _permissive_code,
    "conversation": _conversation,
    "tokenised": _tokenised,
    "packed_tokens": _packed_tokens,
    "instruct": _instruct,
    "chatqa_long": _chatqa_long,
    "gov_report": _gov_report,
    "multi_news": _multi_news,
    "meetingbank": _meetingbank,
    "code_completion": _code_completion,
    "longspec_long": _longspec_long,
    "longspec_sft": _longspec_sft,
}
"""Adapter name -> function of (row, column map, row name) that returns documents without names."""
WITHOUT_TURNS = {"text", "permissive_code", "tokenised", "packed_tokens"}
"""Adapters whose documents are not conversations."""
