"""Stream text from a target, with artifacts or without; one line of statistics goes to stderr at the end."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from omegaconf import DictConfig

from longtrain.errors import ConfigError, DataError
from longtrain.files import UTF8, read_text
from longtrain.jobs.setup import (
    NO_TARGET,
    artifact_names,
    drafting_from,
    load_artifact,
    load_target_from,
    plain,
    sampling_from,
)
from longtrain.settings import AUTO, Text, Tokens, Words, convert
from longtrain.targets.tokenizer import GrowingText, chats

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.cache.row_sets import ReadBudget
    from longtrain.decoding.roles import Parts
    from longtrain.decoding.stats import Stats
    from longtrain.systems import Entry
    from longtrain.targets.model import Target

GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
STDIN = "-"
"""A `prompt_file` that stands for what is piped in."""
KEPT = 128
"""What an eviction artifact keeps where no budget is given: as much as a policy (conf/evict) and eval do."""
PATIENCE_MS = 1000
"""How long nothing may come through a pipe before it is said that it is waited for."""


def run(cfg: DictConfig) -> None:
    """Generate `cfg.decode.max_new_tokens` tokens after the prompt.

    Raises:
        ConfigError: no prompt, or settings that do not fit each other.
        ConflictError: two artifacts, or an artifact and `evict`, play one role.
        DataError: the prompt file cannot be read.
    """
    from longtrain.decoding.engine import Engine

    prompt, sampling, stop = _prompt(cfg), sampling_from(cfg), _stop(cfg)
    count = convert(cfg.decode.max_new_tokens, Tokens, "decode.max_new_tokens")
    entry = entry_of(cfg)
    artifacts = [load_artifact(name, cfg) for name in entry.artifacts]
    target = load_target_from(cfg, path=artifacts[0].target.name if artifacts else None)
    chat = _chat(cfg, target)
    ids = target.encode(prompt, chat=chat)
    parts = parts_of(cfg, target, entry, artifacts)
    colour = bool(cfg.color) and sys.stdout.isatty()
    writer = TextWriter(target, colour=colour, stop=stop, ends=target.info.eos_ids)
    if colour:
        print(f"{DIM}{prompt}{PLAIN}", end="\n" if chat else "", flush=True)
    generation = Engine(target, parts).generate(
        [ids],
        max_new_tokens=count,
        sampling=sampling,
        shape=drafting_from(cfg) if parts.draft else None,
        stop=stop,
        stream=writer,
    )
    writer.close(generation.texts[0] if generation.texts else "")
    print()
    if not chat and chats(target.tokenizer) and not "".join(generation.texts or ()).strip():
        _aside("the target ended the text at once; chat=true asks it in its chat template")
    pairs = zip(entry.artifacts, artifacts, strict=True)
    unverified = [Path(name).name for name, artifact in pairs if not artifact.verified]
    print(statistics(generation.stats, parts, unverified=unverified), file=sys.stderr)


def check(cfg: DictConfig) -> None:
    """Refuse what no text can be made with; loads nothing and leaves what is piped in unread.

    Raises:
        ConfigError: no prompt, no target, or settings that do not fit each other.
        DataError: the prompt file is not there.
    """
    _one_prompt(cfg)
    check_prompt_file(cfg)
    _stop(cfg)
    convert(cfg.chat, Literal["auto", True, False], "chat")
    if not artifact_names(cfg) and not (cfg.target and cfg.target.path):
        raise ConfigError(NO_TARGET)


def _chat(cfg: DictConfig, target: Target) -> bool:
    """Whether the prompt goes through the chat template: `auto` asks a chat model what is typed as `prompt=`.

    A prompt file is continued as it is: it may hold a text, or a conversation that is rendered already.

    Raises:
        ConfigError: another value than auto, true or false.
    """
    asked: Literal["auto", True, False] = convert(cfg.chat, Literal["auto", True, False], "chat")
    if asked != AUTO:
        return bool(asked)
    if cfg.prompt is None or not chats(target.tokenizer):
        return False
    _aside("the prompt is a user's message in the target's chat template; chat=false continues it as text")
    return True


def _aside(line: str) -> None:
    """A line beside the text, dim on a terminal."""
    before, after = (DIM, PLAIN) if sys.stderr.isatty() else ("", "")
    print(f"{before}longtrain: {line}{after}", file=sys.stderr, flush=True)


def statistics(stats: Stats, ran: Parts, *, unverified: Sequence[str] = ()) -> str:
    """One line: tokens, speed, acceptance and memory of what ran, and which artifacts did not verify."""
    parts = [f"UNVERIFIED artifact {name}" for name in unverified] + [
        f"{sum(stats.output_tokens)} tokens after {sum(stats.prompt_tokens)}",
        f"{stats.tokens_per_s:.1f} tokens/s (prefill {stats.prefill_s:.2f} s)",
    ]
    if any(cycle.drafted for cycle in stats.cycles()):
        parts.append(f"acceptance length τ {stats.tau:.2f}, accepted {stats.acceptance_rate:.0%} of drafted")
    if len(stats.shapes) > 1:
        used = sorted(stats.shapes.items(), key=lambda pair: (len(pair[0]), pair[0]))
        parts.append("cycles " + ", ".join(f"{_named(widths)} {count}" for widths, count in used))
    if ran.selector is not None:
        parts.append(_read(ran.selector.budget))
    if stats.evicted:
        parts.append(f"kept {sum(stats.kept_rows):.0f} of {sum(stats.prompt_tokens)} rows")
        parts.append(f"cache {stats.cache_bytes / 1e6:.1f} MB, {stats.cache_bytes_full / 1e6:.1f} before")
    else:
        parts.append(f"cache {stats.cache_bytes / 1e6:.1f} MB")
    if stats.draft_bytes:
        parts.append(f"draft {stats.draft_bytes / 1e6:.2f} MB")
    return "[" + " | ".join(parts) + "]"


def _read(budget: ReadBudget) -> str:
    """How many committed rows a step reads at most, and which keys say so."""
    keys = "evict.budget_tokens" + (", select.every" if budget.every > 1 else "")
    words = f"at most {budget.rows + budget.every - 1} rows read a step ({keys})"
    if budget.dense_layers:
        words += f", all in layers {', '.join(map(str, budget.dense_layers))} (select.dense_layers)"
    return words


def _named(widths: Sequence[int]) -> str:
    """A shape in one word: `plain`, `chain-4`, `4-8-8`."""
    if set(widths) == {1}:
        return f"chain-{len(widths)}"
    return "-".join(map(str, widths)) or "plain"


def entry_of(cfg: DictConfig) -> Entry:
    """What `artifact`, a method without training, `cache` and `evict` name, as one entry of `suite.systems`.

    Raises:
        ConfigError: no such policy, or a method that needs an artifact and has none.
    """
    from longtrain import methods
    from longtrain.methods import policies
    from longtrain.systems.system import BUDGET_KEYS, parse

    names = artifact_names(cfg)
    typed: dict[str, Any] = {"artifact": names, "cache": plain(cfg.cache)}
    if cfg.method is not None:
        spec = methods.get(str(cfg.method.name))
        if spec.attach is None and not names:
            raise ConfigError(f"method={spec.name} brings nothing to decode with; leave method out")
        if spec.objective is not None and not names:
            raise ConfigError(
                f"method={spec.name} needs trained weights, and artifact=null; pass artifact=NAME, or leave "
                "method out"
            )
        if spec.objective is None and spec.attach is not None:
            typed["method"] = plain(cfg.method)
    options = {key: value for key, value in plain(cfg.evict).items() if key not in BUDGET_KEYS}
    name, adaptive = options.pop("policy"), _adaptive(cfg)
    if adaptive is None:
        options.pop("adaptive", None)
    if name is not None:
        policies.policy_class(str(name))
        typed["policy"] = {"name": name, "label": f"evict={name}", **options}
    else:
        typed |= {key: value for key, value in options.items() if value is not None and value is not False}
    if adaptive is not None:
        typed["adaptive"] = adaptive
    typed |= {key: value for key, value in plain(cfg.select).items() if value is not None}
    return parse(typed)


def _adaptive(cfg: DictConfig) -> Any:
    """How an eviction artifact shares its budget out: `evict.adaptive`; policies lack it. None: its own."""
    allowed = Literal[False, "heads", "layers"] | None
    return convert(cfg.evict.get("adaptive"), allowed, "evict.adaptive")


def _stop(cfg: DictConfig) -> list[str]:
    """The strings that end the text: `stop=TEXT` or `stop=[TEXT,TEXT]`."""
    value = plain(cfg.stop)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    texts = Annotated[list[Text], Words("a string, or a list of strings, none of them empty")]
    return convert(listed, texts, "stop")


def parts_of(cfg: DictConfig, target: Target, entry: Entry, artifacts: Sequence[Artifact]) -> Parts:
    """What the entry brings to an engine; a budget that nothing evicts to is refused.

    An eviction artifact without a budget gets `KEPT`, and a line says so.
    """
    from longtrain import methods
    from longtrain.artifact import Artifact
    from longtrain.cache.row_sets import ReadBudget
    from longtrain.decoding.evict import Budget
    from longtrain.systems import Builder
    from longtrain.systems.system import BUDGET_KEYS

    tokens = convert(cfg.evict.get("budget_tokens"), int | None, "evict.budget_tokens")
    ratio = convert(cfg.evict.get("budget_ratio"), float | None, "evict.budget_ratio")
    names = [artifact.method for artifact in artifacts] + ([entry.method.name] if entry.method else [])
    taken = {key for name in names for key in methods.get(name).inference_keys}
    evicts = entry.policy is not None or not taken.isdisjoint(BUDGET_KEYS)
    if (tokens, ratio) == (None, None):
        if any("every" in methods.get(name).inference_keys for name in names):
            tokens = ReadBudget.rows  # what chooses rows has a budget in any case, as in plan
        elif evicts and entry.policy is None:
            tokens = KEPT
            _aside(f"evict.budget_tokens={KEPT}, since none is given: KV entries kept of each layer and head")
    budgets = [Budget(tokens, ratio)] if evicts else []
    parts = Builder(target, budgets=budgets, shapes=(), load=Artifact.load).parts(entry, artifacts)
    if parts.evictor is parts.selector is None and (tokens, ratio) != (None, None):
        raise ConfigError(
            f"an eviction budget of {ratio if tokens is None else tokens} and nothing that evicts or "
            "selects; pass evict=snapkv, say, or an eviction artifact"
        )
    selects = parts.selector is not None
    own, other = ("select", "evict") if selects else ("evict", "select")
    both = selects and entry.policy is not None  # the engine refuses these, whatever the window
    if "window" in taken and not both and cfg[other].get("window") is not None:
        raise ConfigError(
            f"{other}.window={cfg[other].window} and what runs {'chooses rows' if selects else 'evicts'}; "
            f"pass {own}.window={cfg[other].window}"
        )
    if idle := [key for key in entry.options if key not in taken]:
        group = "select" if cfg.select.get(idle[0]) is not None else "evict"
        raise ConfigError(
            f"{group}.{idle[0]}={entry.options[idle[0]]} and nothing that takes it; pass the artifact of a "
            "method that does, or for a policy evict=adakv evict.over=snapkv, say"
        )
    return parts


def _one_prompt(cfg: DictConfig) -> None:
    if (cfg.prompt is None) == (cfg.prompt_file is None):
        raise ConfigError(
            "generate needs one prompt; pass either prompt=TEXT or prompt_file=FILE after its word: "
            "longtrain generate ... prompt=TEXT (prompt_file=- reads what is piped in)"
        )
    if cfg.prompt is not None and str(cfg.prompt) == "":
        raise ConfigError('prompt is empty; pass a text, e.g. prompt="Once upon a time"')
    try:
        str(cfg.prompt).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            "prompt= holds bytes that are not UTF-8; type it in a terminal that is set to UTF-8, or pass "
            "prompt_file=FILE"
        ) from None


def _prompt(cfg: DictConfig) -> str:
    _one_prompt(cfg)
    return read_prompt(cfg.prompt_file) if cfg.prompt is None else str(cfg.prompt)


def check_prompt_file(cfg: DictConfig) -> None:
    """Refuse a prompt file that cannot be read; a pipe can be read only once, and is left as it is.

    Raises:
        DataError: it cannot be read.
    """
    where = cfg.prompt_file
    kept = where is not None and where != STDIN and not Path(where).expanduser().is_fifo()
    if kept and not read_prompt(where):
        raise DataError(f"prompt_file={where} is empty; it needs a text of one token or more")


def read_prompt(where: str | Path) -> str:
    """The text of a prompt file, or of a pipe: one in the place of a file (`<(command)`), or with `-` stdin.

    Line ends stay as they are; a byte order mark at the beginning is no part of it.

    Raises:
        DataError: it cannot be read.
    """
    path = Path(where).expanduser()
    try:
        if where == STDIN:
            if sys.stdin.isatty():
                _wait_said("the prompt that you type; Ctrl-D on a line of its own ends it")
            return sys.stdin.buffer.read().decode(UTF8)
        if path.is_fifo():
            return _piped(path).decode(UTF8)
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"prompt_file={where} cannot be read as UTF-8 text: {reason}") from None


def _piped(path: Path) -> bytes:
    """All that is written to a pipe; where nobody writes to it yet, what is waited for is said."""
    stream = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else opening it waits for somebody who writes
    try:
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        if not poll.poll(PATIENCE_MS):
            _wait_said(f"prompt_file={path}, a pipe to which nothing is written yet; Ctrl-C ends this")
            poll.poll()
        os.set_blocking(stream, True)
        with os.fdopen(stream, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(stream)


def _wait_said(for_what: str) -> None:
    sys.stderr.write(f"longtrain: waiting for {for_what}\n")
    sys.stderr.flush()


class TextWriter:
    """Prints tokens as they come: whole characters only, accepted draft tokens in green.

    As many characters as the longest of `stop` has wait: they may turn out to begin a stop string. What one
    begins is never printed, however much a token brings after it. Special tokens are printed, as in the text
    of a generation; a token of `ends` is no part of either.
    """

    def __init__(
        self, target: Target, *, colour: bool, stop: Sequence[str] = (), ends: Sequence[int] = ()
    ) -> None:
        self.text = GrowingText(target.tokenizer)
        self.colour, self.stop, self.ends = colour, stop, ends
        self.hold = max((len(text) for text in stop), default=0)
        self.waiting: list[tuple[str, bool]] = []
        self.length = 0

    def __call__(self, row: int, tokens: list[int], drafted: list[bool]) -> None:
        """Take new tokens; a byte that does not end a character waits for the next token."""
        for token, from_draft in zip(tokens, drafted, strict=True):
            if token not in self.ends:
                self.waiting += [(char, from_draft) for char in self.text.add(token)]
        text = "".join(char for char, _ in self.waiting)
        found = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        self._print(min([len(self.waiting) - self.hold, *found]))

    def close(self, text: str) -> None:
        """Print what is left of the whole text."""
        rest = text[self.length :]
        colours = [from_draft for _, from_draft in self.waiting]
        colours += [False] * (len(rest) - len(colours))
        self.waiting = list(zip(rest, colours, strict=False))
        self._print(len(self.waiting))

    def show(self, shown: Sequence[tuple[str, bool]]) -> None:
        """Print characters that are certain, with whether each came from the draft."""
        for from_draft, run_of in groupby(shown, key=lambda pair: pair[1]):
            text = "".join(char for char, _ in run_of)
            print(f"{GREEN}{text}{PLAIN}" if from_draft and self.colour else text, end="", flush=True)

    def _print(self, count: int) -> None:
        shown, self.waiting = self.waiting[: max(0, count)], self.waiting[max(0, count) :]
        self.length += len(shown)
        self.show(shown)
