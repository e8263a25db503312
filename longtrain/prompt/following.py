"""Fits what a recipe or a default says to the target, to its window of positions and to the text at hand.

A recipe is written for no target in particular. Its lengths are lowered to the target's window, and one line
says which; a length that is typed on the command line stays as it is and is refused beyond the window. What
follows the free memory is in `longtrain.prompt.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import methods
from longtrain.assets import MANIFEST, bundled_artifacts
from longtrain.errors import ConfigError, DataError, LongtrainError
from longtrain.files import read_json
from longtrain.jobs import outline
from longtrain.jobs.setup import artifact_names, plain
from longtrain.prompt.explain import is_group
from longtrain.settings import parse_tokens
from longtrain.targets.at_hand import fetch_config, folder_of, is_gguf, is_hub_id

if TYPE_CHECKING:
    from omegaconf import DictConfig

READ_DATA = ("prepare", "train", "plan")
"""Jobs that use the lengths of the data and of the method's offsets."""
STEP = 256
"""Lengths of an evaluation are lowered to a multiple of so many tokens, where the window has room for one."""
NEW_TOKENS = ("max_new_tokens", "steps", "new_tokens")
"""Keys of a suite that say how many tokens follow a prompt."""
ANSWER_INCLUDED = ("ruler",)
"""Suites whose lengths have the answer in them."""
SHIPPED = "bundled:train"
"""The text that ships with the package, without the novels that evaluations read."""


@dataclass(frozen=True)
class Length:
    """A length of the configuration that the target's window bounds.

    Args:
        keys: the keys under which it can be typed; the first names it.
        values: the token counts there.
        most: the largest that the window has room for.
        why: what the bound is, for the message.
        lowered: what the values become.
        put: sets them.
    """

    keys: tuple[str, ...]
    values: tuple[int, ...]
    most: int
    why: str
    lowered: tuple[int, ...]
    put: Callable[[tuple[int, ...]], None]


def typed(key: str, words: Sequence[str]) -> bool:
    """Whether the command line sets a key, a part of it, or a mapping or list that holds it."""
    for word in words:
        name = word.lstrip("+~").partition("=")[0]
        if name == key or (not is_group(name) and (key.startswith(f"{name}.") or name.startswith(f"{key}."))):
            return True
    return False


def fit_text(cfg: DictConfig, jobs: Sequence[str], words: Sequence[str]) -> list[str]:
    """Fit the texts that are trained on and evaluated with to what is there.

    Args:
        cfg: the resolved configuration; changed in place.
        jobs: what will be done.
        words: the overrides of the command line.

    Returns:
        Lines that say what was changed.
    """
    return [one for one in (shipped_text(cfg, jobs, words), fit_kinds(cfg, jobs, words)) if one]


def window_takes_minutes(cfg: DictConfig) -> bool:
    """Whether the target is a GGUF file that is yet to be dequantised, before which its window is unknown."""
    if (file := _gguf_file(cfg)) is None:
        return False
    from longtrain.targets.stored.gguf import is_dequantised  # which imports numpy

    return not is_dequantised(file)


def _gguf_file(cfg: DictConfig) -> Path | None:
    """The GGUF file that is the target; None where it is none, or not there."""
    file = Path(str(cfg.target.path if cfg.target and cfg.target.path else "")).expanduser()
    return file if is_gguf(file) and file.is_file() else None


def fit_kinds(cfg: DictConfig, jobs: Sequence[str], words: Sequence[str]) -> str | None:
    """Take all of a text that is typed for an evaluation, where it has nothing of the recipe's kinds.

    Returns:
        A line that says so; None where the kinds stay.
    """
    if "eval" not in jobs or not typed("suite.text", words) or typed("suite.kinds", words):
        return None
    kinds, text = plain(cfg.suite.get("kinds")), cfg.suite.get("text")
    if not (isinstance(kinds, list) and kinds and isinstance(text, str)):
        return None
    from longtrain.evaluation.corpora import files_of_kinds

    try:
        files_of_kinds(text)
    except DataError:
        return None  # whoever reads it says what is wrong
    try:
        files_of_kinds(text, kinds=kinds)
    except DataError:
        cfg.suite.kinds = []
        return f"suite.text={text} has no text of suite.kinds=[{','.join(kinds)}], so all of it is taken"
    return None


def shipped_text(cfg: DictConfig, jobs: Sequence[str], words: Sequence[str]) -> str | None:
    """Take the text that ships with the package where a mixture of local folders is given none.

    The data then has a name of its own, so that what was prepared of a user's files stays. A command that
    prepares nothing leaves the name alone where data of that name is there.

    Returns:
        A line that says so; None where nothing is to be said.
    """
    data = cfg.get("data")
    sources = plain(data.get("sources")) if data and "books" in data else None
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
    keys = [f"data.{key}" for key in ("books", "code", "instruct") if key in data]
    return (
        f"{', '.join(keys)} name no files, so the five novels that ship with longtrain are used "
        f"(data.books={SHIPPED}, 1.7 MB), which is enough to try the commands and little to learn from; "
        f"pass {keys[0]}=FOLDER"
    )


def window_of(cfg: DictConfig) -> int | None:
    """The target's window in tokens; None where it is not known before the target is fetched or loaded.

    Raises:
        LongtrainError: the target is a GGUF file that cannot be dequantised; nothing reads it a second time.
    """
    if cfg.method is not None and methods.trains_target(str(cfg.method.name)):
        return None  # it trains a target
    if (file := _gguf_file(cfg)) is not None:
        folder_of(file)
    try:
        if cfg.target and (cfg.target.path or cfg.target.shape):
            where = str(cfg.target.path or "")
            unknown = where and cfg.target.shape is None and outline.config_file(where) is None
            if unknown and not cfg.dry_run and is_hub_id(where):
                fetch_config(where)
            return outline.target_shape(cfg)[0].max_positions
        for name in artifact_names(cfg):
            place = Path(cfg.home) / "checkpoints" / name
            folder = next((one for one in (Path(name), place) if one.is_dir()), bundled_artifacts().get(name))
            target = read_json(Path(str(folder)) / MANIFEST)["target"]
            file = outline.config_file(str(target["name"]))  # of a local folder it names the last part alone
            return int(
                target["max_positions"] if file is None else read_json(file)["max_position_embeddings"]
            )
    except (LongtrainError, OSError, ValueError, KeyError, TypeError):
        return None  # whoever loads it says what is wrong
    return None


def fit_lengths(
    cfg: DictConfig, jobs: Sequence[str], words: Sequence[str]
) -> tuple[str | None, list[ConfigError]]:
    """Lower the lengths of recipes and defaults to the target's window.

    Args:
        cfg: the resolved configuration; changed in place.
        jobs: what will be done.
        words: the overrides of the command line.

    Returns:
        A line that says what was lowered, None where nothing was; and an error for each typed length that is
        beyond the window.
    """
    window = window_of(cfg)
    if window is None:
        return None, []
    said, faults = [], []
    for length in _lengths(cfg, jobs, window):
        if max(length.values) <= length.most:
            continue
        if any(typed(key, words) for key in length.keys):
            faults.append(_beyond(length, window))
            continue
        length.put(length.lowered)
        said.append(f"{length.keys[0]} {_shown(length.lowered)} (was {_shown(length.values)})")
    if not said:
        return None, faults
    return f"fitted to the target's window of {window} tokens: {', '.join(said)}", faults


def _lengths(cfg: DictConfig, jobs: Sequence[str], window: int) -> Iterator[Length]:
    """Every length that the window bounds."""
    if not set(jobs).isdisjoint((*READ_DATA, "export")) or cfg.method is not None:
        yield from _of_method(cfg.method, "method", window)
    if cfg.get("data") and "sources" in cfg.data:  # else it is what a target is trained on
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
    for stage in stages if isinstance(stages, Sequence) else ():  # whoever reads the stages refuses others
        if isinstance(stage, Mapping) and isinstance(stage.get("doc_tokens"), int):
            yield _single(
                stage,
                "doc_tokens",
                "data.stages.doc_tokens",
                over=("data.stages",),
                most=window,
                why="a piece of a document; row_tokens may stay, documents in a row do not see each other",
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
    """Token counts as typed; none where one of them is no count, which the suite's own settings refuse."""
    listed = plain(values)
    found = tuple(count(value) for value in listed) if isinstance(listed, list) else ()
    return found if all(found) else ()


def _shown(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(values) == 1 else f"[{','.join(map(str, values))}]"
