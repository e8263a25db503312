"""`longtrain generate`: stream text from a target, with or without artifacts; statistics go to stderr at the
end.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError, DataError
from longtrain.files import UTF8, read_text
from longtrain.jobs.setup import load_artifact, load_target
from longtrain.settings import AUTO
from longtrain.targets.tokenizer import GrowingText, chats

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.cache.entry_sets import ReadBudget
    from longtrain.config import EvictConfig, GenerateKeys, RunConfig
    from longtrain.decoding.roles import Parts
    from longtrain.decoding.stats import Stats
    from longtrain.systems import Entry
    from longtrain.targets.model import Target

GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
STDIN = "-"
"""The value of `prompt_file` for reading stdin."""
KEPT = 128
"""Default budget of an eviction artifact: the same as that of policies (conf/evict) and of `eval`."""
PATIENCE_MS = 1000
"""Delay before a message that input from a pipe is awaited."""


def run(cfg: RunConfig) -> None:
    """Generate `cfg.decode.max_new_tokens` tokens after the prompt.

    Raises:
        ConfigError: there is no prompt, or settings contradict each other.
        ConflictError: two artifacts, or an artifact and `evict`, have the same role.
        DataError: the prompt file cannot be read.
    """
    from longtrain.decoding.engine import Engine

    asked, decode, sampling = cfg.generate, cfg.decode, cfg.sampling
    prompt = _prompt(asked)
    target, parts, artifacts = loaded(cfg)
    chat = _chat(asked, target)
    ids = target.encode(prompt, chat=chat)
    colour = asked.color and sys.stdout.isatty()
    writer = TextWriter(target, colour=colour, stop=asked.stop, ends=target.info.eos_ids)
    if colour:
        print(f"{DIM}{prompt}{PLAIN}", end="\n" if chat else "", flush=True)
    generation = Engine(target, parts).generate(
        [ids],
        max_new_tokens=decode.max_new_tokens,
        sampling=sampling,
        shape=decode.drafting() if parts.draft else None,
        stop=asked.stop,
        stream=writer,
    )
    writer.close(generation.texts[0] if generation.texts else "")
    print()
    if not chat and chats(target.tokenizer) and not "".join(generation.texts or ()).strip():
        _aside("the target ended the text at once; chat=true asks it in its chat template")
    unverified = [Path(name).name for name, artifact in artifacts if not artifact.verified]
    print(statistics(generation.stats, parts, unverified=unverified), file=sys.stderr)


def loaded(cfg: RunConfig) -> tuple[Target, Parts, list[tuple[str, Artifact]]]:
    """Load the target, the parts to decode with, and the artifacts with their names.

    Raises:
        ConfigError: settings contradict each other.
        ConflictError: two artifacts, or an artifact and `evict`, have the same role.
    """
    entry = entry_of(cfg)
    artifacts = [load_artifact(name, cfg.artifact_source) for name in entry.artifacts]
    target = load_target(cfg.target, seed=cfg.seed, path=artifacts[0].target.name if artifacts else None)
    parts = parts_of(
        target, entry, artifacts, evict=cfg.evict, select=cfg.select, lookup=cfg.decode.lookup or "auto"
    )
    return target, parts, list(zip(entry.artifacts, artifacts, strict=True))


def check(cfg: RunConfig) -> None:
    """Refuse settings that cannot generate text; loads nothing and does not read from pipes.

    Raises:
        ConfigError: there is no prompt or target, or settings contradict each other.
        DataError: the prompt file does not exist.
    """
    _one_prompt(cfg.generate)
    check_prompt_file(cfg.generate)
    if not cfg.artifacts:
        cfg.target.required_path()


def _chat(asked: GenerateKeys, target: Target) -> bool:
    """True if the prompt is put into the chat template; `auto` does so for `prompt=` if the target has a
    template.

    A prompt file is continued unchanged: it may contain a text, or a conversation that is already rendered.
    """
    if asked.chat != AUTO:
        return bool(asked.chat)
    if asked.prompt is None or not chats(target.tokenizer):
        return False
    _aside("the prompt is a user's message in the target's chat template; chat=false continues it as text")
    return True


def _aside(line: str) -> None:
    """Print a line to stderr, dimmed on a terminal."""
    before, after = (DIM, PLAIN) if sys.stderr.isatty() else ("", "")
    print(f"{before}longtrain: {line}{after}", file=sys.stderr, flush=True)


def statistics(stats: Stats, ran: Parts, *, unverified: Sequence[str] = ()) -> str:
    """One line on tokens, speed, acceptance and memory of a run, and the artifacts that did not verify."""
    parts = [f"UNVERIFIED artifact {name}" for name in unverified] + [
        f"{sum(stats.output_tokens)} tokens after {sum(stats.prompt_tokens)}",
        f"{stats.tokens_per_s:.1f} tokens/s (prefill {stats.prefill_s:.2f} s)",
    ]
    if any(cycle.drafted for cycle in stats.cycles()):
        parts.append(f"acceptance length τ {stats.tau:.2f}, accepted {stats.acceptance_rate:.0%} of drafted")
        if stats.copied_share > 0:
            parts.append(f"{stats.copied_share:.0%} of accepted copied by look-up")
    if len(stats.shapes) > 1:
        used = sorted(stats.shapes.items(), key=lambda pair: (len(pair[0]), pair[0]))
        parts.append("cycles " + ", ".join(f"{_named(widths)} {count}" for widths, count in used))
    if ran.selector is not None:
        parts.append(_read(ran.selector.budget))
    if stats.evicted:
        parts.append(f"kept {sum(stats.kept_entries):.0f} of {sum(stats.prompt_tokens)} entries")
        parts.append(f"cache {stats.cache_bytes / 1e6:.1f} MB, {stats.cache_bytes_full / 1e6:.1f} before")
    else:
        parts.append(f"cache {stats.cache_bytes / 1e6:.1f} MB")
    if stats.draft_bytes:
        parts.append(f"draft {stats.draft_bytes / 1e6:.2f} MB")
    return "[" + " | ".join(parts) + "]"


def _read(budget: ReadBudget) -> str:
    """The maximum number of committed KV entries that a step reads, and the keys that set it."""
    keys = "evict.budget_tokens" + (", select.every" if budget.every > 1 else "")
    words = f"at most {budget.rows + budget.every - 1} entries read a step ({keys})"
    if budget.dense_layers:
        words += f", all in layers {', '.join(map(str, budget.dense_layers))} (select.dense_layers)"
    return words


def _named(widths: Sequence[int]) -> str:
    """The name of a draft's shape: `plain`, `chain-4`, `4-8-8`, `look-up-15`, `chain-4+look-up-11`."""
    drafted = [width for width in widths if width]
    copied = len(widths) - len(drafted)
    names = (
        [f"chain-{len(drafted)}" if set(drafted) == {1} else "-".join(map(str, drafted))] if drafted else []
    )
    names += [f"look-up-{copied}"] if copied else []
    return "+".join(names) or "plain"


def entry_of(cfg: RunConfig) -> Entry:
    """The system made of `artifact`, an untrained method, `cache` and `evict`, as one entry of
    `suite.systems`.

    Raises:
        ConfigError: there is no such policy, or a method needs an artifact and has none.
    """
    from longtrain.methods import policies
    from longtrain.systems.system import parse

    method, evict = cfg.method, cfg.evict
    adaptive = {} if evict.adaptive is None else {"adaptive": evict.adaptive}
    options = {**evict.options, **adaptive}  # policies refuse an unknown option
    typed: dict[str, Any] = {"artifact": cfg.artifacts, "cache": cfg.cache}
    if method is not None:
        if method.spec.attach is None and not cfg.artifacts:
            raise ConfigError(f"method={method.name} brings nothing to decode with; leave method out")
        if method.spec.objective is not None and not cfg.artifacts:
            raise ConfigError(
                f"method={method.name} needs trained weights, and artifact=null; pass artifact=NAME, or "
                "leave method out"
            )
        if method.spec.objective is None and method.spec.attach is not None:
            typed["method"] = dict(method.values)
    if evict.policy is not None:
        policies.policy_class(evict.policy)
        typed["policy"] = {"name": evict.policy, "label": f"evict={evict.policy}", **options}
    else:
        typed |= {key: value for key, value in options.items() if value is not None and value is not False}
    typed |= adaptive
    return parse(typed | cfg.select)


def parts_of(
    target: Target,
    entry: Entry,
    artifacts: Sequence[Artifact],
    *,
    evict: EvictConfig,
    select: Mapping[str, Any],
    lookup: str,
) -> Parts:
    """Build the engine's parts from the entry; a budget without an evictor is refused.

    An eviction artifact without a budget gets `KEPT`, and a line reports it.

    Args:
        target: the frozen model.
        entry: what decodes (`entry_of`).
        artifacts: the entry's artifacts, in their order.
        evict: the group `evict`, with the budget.
        select: the keys of `select` that are set.
        lookup: the key `decode.lookup`.

    Raises:
        ConfigError: a budget or a key that nothing takes.
    """
    from longtrain import methods
    from longtrain.artifact import Artifact
    from longtrain.cache.entry_sets import ReadBudget
    from longtrain.decoding.evict import Budget
    from longtrain.systems import Builder
    from longtrain.systems.system import BUDGET_KEYS

    tokens, ratio = evict.budget_tokens, evict.budget_ratio
    names = [artifact.method for artifact in artifacts] + ([entry.method.name] if entry.method else [])
    taken = {key for name in names for key in methods.get(name).inference_keys}
    evicts = entry.policy is not None or not taken.isdisjoint(BUDGET_KEYS)
    if (tokens, ratio) == (None, None):
        if any("every" in methods.get(name).inference_keys for name in names):
            tokens = ReadBudget.rows  # selectors always have a budget, as in `plan`
        elif evicts and entry.policy is None:
            tokens = KEPT
            _aside(f"evict.budget_tokens={KEPT}, since none is given: KV entries kept of each layer and head")
    budgets = [Budget(tokens, ratio)] if evicts else []
    builder = Builder(target, budgets=budgets, shapes=(), load=Artifact.load, lookup=lookup)
    parts = builder.parts(entry, artifacts)
    if parts.evictor is parts.selector is None and (tokens, ratio) != (None, None):
        raise ConfigError(
            f"an eviction budget of {ratio if tokens is None else tokens} and nothing that evicts or "
            "selects; pass evict=snapkv, say, or an eviction artifact"
        )
    selects = parts.selector is not None
    own, other = ("select", "evict") if selects else ("evict", "select")
    window = (evict.options if selects else select).get("window")
    both = selects and entry.policy is not None  # the engine refuses these at any window
    if "window" in taken and not both and window is not None:
        raise ConfigError(
            f"{other}.window={window} and what runs {'selects entries' if selects else 'evicts'}; pass "
            f"{own}.window={window}"
        )
    if idle := [key for key in entry.options if key not in taken]:
        group = "select" if idle[0] in select else "evict"
        raise ConfigError(
            f"{group}.{idle[0]}={entry.options[idle[0]]} and nothing that takes it; pass the artifact of a "
            "method that does, or for a policy evict=adakv evict.over=snapkv, say"
        )
    return parts


def _one_prompt(asked: GenerateKeys) -> None:
    if (asked.prompt is None) == (asked.prompt_file is None):
        raise ConfigError(
            "generate needs one prompt; pass either prompt=TEXT or prompt_file=FILE after its word: "
            "longtrain generate ... prompt=TEXT (prompt_file=- reads what is piped in)"
        )
    if asked.prompt == "":
        raise ConfigError('prompt is empty; pass a text, e.g. prompt="Once upon a time"')
    try:
        str(asked.prompt).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            "prompt= holds bytes that are not UTF-8; type it in a terminal that is set to UTF-8, or pass "
            "prompt_file=FILE"
        ) from None


def _prompt(asked: GenerateKeys) -> str:
    _one_prompt(asked)
    return read_prompt(asked.prompt_file) if asked.prompt is None else str(asked.prompt)


def check_prompt_file(asked: GenerateKeys) -> None:
    """Refuse a prompt file that cannot be read; pipes are not opened, because they can be read only once.

    Raises:
        DataError: the file cannot be read.
    """
    where = asked.prompt_file
    kept = where is not None and where != STDIN and not Path(where).expanduser().is_fifo()
    if kept and not read_prompt(where):
        raise DataError(f"prompt_file={where} is empty; it needs a text of one token or more")


def read_prompt(where: str | Path) -> str:
    """The text of a prompt file, of a named pipe (as from `<(command)`), or of stdin for `-`.

    Line ends are preserved; a byte order mark at the beginning is removed.

    Raises:
        DataError: the file cannot be read.
    """
    path = Path(where).expanduser()
    try:
        if where == STDIN:
            if sys.stdin.isatty():
                _print_waiting("the prompt that you type; Ctrl-D on a line of its own ends it")
            return sys.stdin.buffer.read().decode(UTF8)
        if path.is_fifo():
            return _piped(path).decode(UTF8)
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"prompt_file={where} cannot be read as UTF-8 text: {reason}") from None


def _piped(path: Path) -> bytes:
    """All bytes written to a pipe; prints a message if nothing arrives within `PATIENCE_MS`."""
    stream = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a blocking open would wait for a writer
    try:
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        if not poll.poll(PATIENCE_MS):
            _print_waiting(f"prompt_file={path}, a pipe to which nothing is written yet; Ctrl-C ends this")
            poll.poll()
        os.set_blocking(stream, True)
        with os.fdopen(stream, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(stream)


def _print_waiting(for_what: str) -> None:
    sys.stderr.write(f"longtrain: waiting for {for_what}\n")
    sys.stderr.flush()


class TextWriter:
    """Prints tokens as they are generated: complete characters only, accepted draft tokens in green.

    Characters that may begin a stop string are held back, up to the length of the longest of `stop`. Text
    from a stop string on is never printed. Special tokens are printed, as in the text
    of a `Generation`; tokens of `ends` are not. `write` receives the text; by default it is printed.
    """

    def __init__(
        self,
        target: Target,
        *,
        colour: bool,
        stop: Sequence[str] = (),
        ends: Sequence[int] = (),
        write: Callable[[str], object] | None = None,
    ) -> None:
        self.text = GrowingText(target.tokenizer)
        self.colour, self.stop, self.ends = colour, stop, ends
        self.write = write or partial(print, end="", flush=True)
        self.hold = max((len(text) for text in stop), default=0)
        self.waiting: list[tuple[str, bool]] = []
        self.length = 0

    def __call__(self, row: int, tokens: list[int], drafted: list[bool]) -> None:
        """Add new tokens; bytes that do not complete a character wait for the next token."""
        for token, from_draft in zip(tokens, drafted, strict=True):
            if token not in self.ends:
                self.waiting += [(char, from_draft) for char in self.text.add(token)]
        text = "".join(char for char, _ in self.waiting)
        found = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        self._print(min([len(self.waiting) - self.hold, *found]))

    def close(self, text: str) -> None:
        """Print the rest of the final text."""
        rest = text[self.length :]
        colours = [from_draft for _, from_draft in self.waiting]
        colours += [False] * (len(rest) - len(colours))
        self.waiting = list(zip(rest, colours, strict=False))
        self._print(len(self.waiting))

    def _print(self, count: int) -> None:
        """Print the first waiting characters, which cannot change any more."""
        shown, self.waiting = self.waiting[: max(0, count)], self.waiting[max(0, count) :]
        self.length += len(shown)
        for from_draft, run_of in groupby(shown, key=lambda pair: pair[1]):
            text = "".join(char for char, _ in run_of)
            self.write(f"{GREEN}{text}{PLAIN}" if from_draft and self.colour else text)
