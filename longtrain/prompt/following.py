"""Adapts values of recipes and defaults to the target, its context window and the available text.

A recipe is not specific to one target. Its lengths are lowered to the target's context window, and one line
lists them; a length typed on the command line is never changed, and is refused beyond the window. Values
that depend on free memory are adapted in `longtrain.prompt.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import methods
from longtrain.assets import manifest_of
from longtrain.config import RunConfig
from longtrain.errors import ConfigError, DataError, LongtrainError
from longtrain.files import read_json
from longtrain.jobs.planning.target_shape import config_file, target_shape
from longtrain.prompt.explain import is_group
from longtrain.settings import parse_tokens
from longtrain.targets.at_hand import fetch_config, folder_of, is_gguf, is_hub_id

if TYPE_CHECKING:
    from omegaconf import DictConfig

READ_DATA = ("prepare", "train", "plan")
"""Jobs that use the lengths of the data and the method's offsets."""
STEP = 256
"""Evaluation lengths are lowered to a multiple of this many tokens, if the window is at least that long."""
NEW_TOKENS = ("max_new_tokens", "steps", "new_tokens")
"""Keys of a suite for the number of tokens that follow a prompt."""
ANSWER_INCLUDED = ("ruler",)
"""Suites whose lengths include the answer."""
SHIPPED = "bundled:train"
"""The bundled training text, without the novels that evaluations read."""


@dataclass(frozen=True)
class Length:
    """A configured length that the target's context window limits.

    Args:
        keys: its keys; the first is used in messages.
        values: its token counts.
        most: the largest value that fits the window.
        why: description of the limit, for messages.
        lowered: the lowered values.
        put: writes values into the configuration.
    """

    keys: tuple[str, ...]
    values: tuple[int, ...]
    most: int
    why: str
    lowered: tuple[int, ...]
    put: Callable[[tuple[int, ...]], None]


def typed(key: str, words: Sequence[str]) -> bool:
    """True if the command line sets a key, a part of it, or a mapping or list that contains it."""
    for word in words:
        name = word.lstrip("+~").partition("=")[0]
        if name == key or (not is_group(name) and (key.startswith(f"{name}.") or name.startswith(f"{key}."))):
            return True
    return False


def fit_text(cfg: DictConfig, jobs: Sequence[str], words: Sequence[str]) -> list[str]:
    """Replace training and evaluation texts that are not available by available ones.

    Args:
        cfg: the resolved configuration; changed in place.
        jobs: the jobs to run.
        words: the overrides of the command line.

    Returns:
        Lines that report the changes.
    """
    return [one for one in (shipped_text(cfg, jobs, words), fit_kinds(cfg, jobs, words)) if one]


def window_takes_minutes(cfg: RunConfig) -> bool:
    """True if the target is a GGUF file that is not dequantised yet; until then its window is unknown."""
    if (file := _gguf_file(cfg)) is None:
        return False
    from longtrain.targets.stored.gguf import is_dequantised  # imports numpy

    return not is_dequantised(file)


def _gguf_file(cfg: RunConfig) -> Path | None:
    """The path of the target's GGUF file, or None if the target is not a GGUF file or does not exist."""
    file = Path(str((cfg.values.get("target") or {}).get("path") or "")).expanduser()
    return file if is_gguf(file) and file.is_file() else None


def fit_kinds(cfg: DictConfig, jobs: Sequence[str], words: Sequence[str]) -> str | None:
    """Use all of a typed evaluation text if none of it has the recipe's kinds.

    Returns:
        A line that reports it, or None if nothing changed.
    """
    if "eval" not in jobs or not typed("suite.text", words) or typed("suite.kinds", words):
        return None
    suite = RunConfig.from_hydra(cfg).suite.values
    kinds, text = suite.get("kinds"), suite.get("text")
    if not (isinstance(kinds, list) and kinds and isinstance(text, str)):
        return None
    from longtrain.evaluation.corpora import files_of_kinds

    try:
        files_of_kinds(text)
    except DataError:
        return None  # raises when it is read later
    try:
        files_of_kinds(text, kinds=kinds)
    except DataError:
        cfg.suite.kinds = []
        return f"suite.text={text} has no text of suite.kinds=[{','.join(kinds)}], so all of it is taken"
    return None


def shipped_text(cfg: DictConfig, jobs: Sequence[str], words: Sequence[str]) -> str | None:
    """Use the bundled text if a mixture of local folders has no folder set.

    The data then gets its own name, so that data prepared from a user's files is kept. A command that
    prepares nothing does not change the name if data of that name exists.

    Returns:
        A line that reports it, or None if nothing changed.
    """
    data = cfg.get("data")
    sources = RunConfig.from_hydra(cfg).data_values.get("sources") if data and "books" in data else None
    files = [one for one in sources or () if isinstance(one, Mapping) and "synthetic" not in one]
    if not files or not all(one.get("optional") and not _where(one) for one in files):
        return None
    made = any((Path(str(cfg.home)) / "data").glob(f"{data.name}-*/manifest.json"))
    if set(jobs).isdisjoint(READ_DATA) and made:
        return None
    data.books = SHIPPED
    if not typed("data.name", words):
        data.name = f"{data.name}_bundled"
    if set(jobs).isdisjoint(READ_DATA):
        return None
    keys = [f"data.{key}" for key in ("books", "code", "instruct", "answered") if key in data]
    return (
        f"{', '.join(keys)} name no files, so the five novels that ship with longtrain are used "
        f"(data.books={SHIPPED}, 1.7 MB), which is enough to try the commands and little to learn from; "
        f"pass {keys[0]}=FOLDER"
    )


def window_of(cfg: RunConfig) -> int | None:
    """The target's context window in tokens; None if unknown before the target is downloaded or loaded.

    Raises:
        LongtrainError: the target is a GGUF file that cannot be dequantised; it is not read a second time.
    """
    if cfg.method is not None and methods.trains_target(cfg.method.name):
        return None  # the method trains a target
    if (file := _gguf_file(cfg)) is not None:
        folder_of(file)
    try:
        if cfg.target.path or cfg.target.shape:
            where = str(cfg.target.path or "")
            unknown = where and cfg.target.shape is None and config_file(where) is None
            if unknown and not cfg.dry_run and is_hub_id(where):
                fetch_config(where)
            return target_shape(cfg.target)[0].max_positions
        for name in cfg.artifacts:
            if (manifest := manifest_of(name, cfg.checkpoints)) is None:
                return None  # raises when it is loaded later
            target = read_json(manifest)["target"]
            file = config_file(str(target["name"]))  # for a local folder `name` is only the last part
            return int(
                target["max_positions"] if file is None else read_json(file)["max_position_embeddings"]
            )
    except (LongtrainError, OSError, ValueError, KeyError, TypeError):
        return None  # raises when it is loaded later
    return None


def fit_lengths(
    cfg: DictConfig, jobs: Sequence[str], words: Sequence[str]
) -> tuple[str | None, list[ConfigError]]:
    """Lower the lengths of recipes and defaults to the target's context window.

    Args:
        cfg: the resolved configuration; changed in place.
        jobs: the jobs to run.
        words: the overrides of the command line.

    Returns:
        A line that lists the lowered lengths, or None; and an error for each typed length that is
        beyond the window.
    """
    window = window_of(RunConfig.from_hydra(cfg))
    if window is None:
        return None, []
    changes, faults = [], []
    for length in _lengths(cfg, jobs, window):
        if max(length.values) <= length.most:
            continue
        if any(typed(key, words) for key in length.keys):
            faults.append(_beyond(length, window))
            continue
        length.put(length.lowered)
        changes.append(f"{length.keys[0]} {_shown(length.lowered)} (was {_shown(length.values)})")
    if not changes:
        return None, faults
    return f"fitted to the target's window of {window} tokens: {', '.join(changes)}", faults


def _lengths(cfg: DictConfig, jobs: Sequence[str], window: int) -> Iterator[Length]:
    """Every length that the window limits."""
    if not set(jobs).isdisjoint((*READ_DATA, "export")) or cfg.method is not None:
        yield from _of_method(cfg.method, "method", window)
    if cfg.get("data") and "sources" in cfg.data:  # otherwise it is a target's training data
        yield from _of_data(cfg.data, window)
    if "eval" in jobs and cfg.get("compare") is None:
        yield from _of_suite(cfg, window)


def _of_method(method: Any, key: str, window: int) -> Iterator[Length]:
    if method is None:
        return
    for name, member in (method.get("members") or {}).items():
        yield from _of_method(member, f"{key}.members.{name}", window)
    most = method.get("offset_max_tokens")
    if method.get("anchor_offset") and isinstance(most, int):
        where = f"{key}.offset_max_tokens"
        why = "positions that offsets reach; 0 means all of them"
        yield _single(method, "offset_max_tokens", where, most=window, why=why)


def _of_data(data: DictConfig, window: int) -> Iterator[Length]:
    stages = data.get("stages")
    for stage in stages if isinstance(stages, Sequence) else ():  # refused elsewhere
        if isinstance(stage, Mapping) and isinstance(stage.get("doc_tokens"), int):
            yield _single(
                stage,
                "doc_tokens",
                "data.stages.doc_tokens",
                over=("data.stages",),
                most=window,
                why="a piece of a document; sequence_tokens may stay, packed documents do not see each other",
            )
    answer = data.get("answer_tokens")
    room = max(2, window - (answer if isinstance(answer, int) else 0))
    if data.get("prompt_tokens"):
        why = f"a prompt beside data.answer_tokens={answer}"
        yield from _pair(data, "prompt_tokens", "data.prompt_tokens", most=room, why=why)
    for source in data.get("sources") or ():
        options = source.get("options") if isinstance(source, Mapping) else None
        if options and options.get("doc_tokens"):
            where = "data.sources.options.doc_tokens"
            yield from _pair(
                options, "doc_tokens", where, over=("data.sources",), most=window, why="a document"
            )


def _of_suite(cfg: DictConfig, window: int) -> Iterator[Length]:
    suite = cfg.suite
    new = 0 if suite.name in ANSWER_INCLUDED else sum(count(suite.get(key)) for key in NEW_TOKENS)
    if values := counts(suite.get("lengths")):
        most = window - new
        at_most = most - most % STEP or most
        lowered = tuple(dict.fromkeys(value if value <= most else at_most for value in values))

        def put(found: tuple[int, ...]) -> None:
            suite.lengths = list(found)
            if "lengths" in cfg:
                cfg.lengths = list(found)

        why = f"a prompt and the {new} tokens after it" if new else "a prompt and its answer"
        if most > 0:
            yield Length(("lengths", "suite.lengths"), values, most, why, lowered, put)
    if suite.name == "perplexity" and count(suite.get("window")):
        yield _single(suite, "window", "suite.window", most=window, why="a context and the tokens scored")


def _single(node: Any, name: str, key: str, *, over: tuple[str, ...] = (), most: int, why: str) -> Length:
    def put(found: tuple[int, ...]) -> None:
        node[name] = found[0]

    value = count(node.get(name))
    return Length((key, *over), (value,), most, why, (min(value, most),), put)


def _pair(
    node: Any, name: str, key: str, *, over: tuple[str, ...] = (), most: int, why: str
) -> Iterator[Length]:
    def put(found: tuple[int, ...]) -> None:
        node[name] = list(found)

    values = counts(node.get(name))
    if len(values) == 2:
        yield Length((key, *over), values, most, why, tuple(min(value, most) for value in values), put)


def _beyond(length: Length, window: int) -> ConfigError:
    return ConfigError(
        f"{length.keys[0]}={_shown(length.values)} is beyond the target's window of {window} tokens "
        f"({length.why}); pass at most {length.most}, or target.max_positions if its RoPE scaling reaches "
        "further"
    )


def _where(source: Mapping[str, Any]) -> Any:
    """The path of a source of files."""
    return next(
        (source[key] for key in ("text", "jsonl", "conversations", "tokenised") if key in source), "?"
    )


def count(value: Any) -> int:
    """A token count as typed; 0 for anything else."""
    try:
        return parse_tokens(value) if isinstance(value, int | str) and not isinstance(value, bool) else 0
    except ConfigError:
        return 0


def counts(values: Any) -> tuple[int, ...]:
    """Token counts as typed; empty if one of them is not a count, which the suite's own settings refuse."""
    listed = isinstance(values, Sequence) and not isinstance(values, str)
    found = tuple(count(value) for value in values) if listed else ()
    return found if all(found) else ()


def _shown(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(values) == 1 else f"[{','.join(map(str, values))}]"
