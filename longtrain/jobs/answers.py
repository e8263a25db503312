"""`longtrain answers`: the target answers prompts from any data, sampled; the answers are data to train on.

On-policy data: text that the target itself wrote, which is what a draft will have to predict, and what an
eviction module will have to preserve.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import provenance, tables
from longtrain.config import RunConfig
from longtrain.errors import ConfigError, DataError, LongtrainError
from longtrain.files import as_json, read_json, write_files
from longtrain.jobs import parts
from longtrain.jobs.prepare import NO_TOKENIZER
from longtrain.jobs.setup import load_target
from longtrain.log import get_logger
from longtrain.progress import Progress
from longtrain.settings import wrong

if TYPE_CHECKING:
    from longtrain.config.job_keys import AnswersKeys
    from longtrain.data.chat.asked import Asking, Unanswered, WeightedQuestions
    from longtrain.jobs.answering.batches import AnswerBatches
    from longtrain.jobs.answering.places import Places
    from longtrain.targets.model import Target

log = get_logger(__name__)

LEFT_OUT = {
    "long": "longer than the target's context, less decode.max_new_tokens",
    "short": "shorter than document_tokens",
    "unasked": "conversations without a question",
    "twice": "asked already",
    "bad": "that cannot be read",
}
CACHE_SHARE = 0.7
"""Share of the free memory for KV entries without `batch_tokens`; prefills and logits take the rest."""
STOPPED = "stopped as asked; finished answers are kept, and the same command goes on"


def run(cfg: RunConfig) -> None:
    """Answer the prompts of `cfg.data` that have no answer yet, or those of the part given by `shard`.

    Raises:
        ConfigError: no data or target is chosen, or the folder holds answers of other settings.
        DataError: a source cannot be read or gives no prompt, or the target has no chat template.
        LongtrainError: a part failed, or was stopped; finished answers are kept.
    """
    check(cfg)
    keys, part, folder = cfg.answers, cfg.answers.part(), cfg.run_dir / "answers"
    whole = True
    if part is None and keys.shards > 1:
        work = partial(work_part, cfg.values)
        device = cfg.target.device_here()
        parts.run_all(work, keys.shards, logs=folder / "state", device=device)
        _report_parts(folder, keys.shards)
    else:
        with Progress(None, 0, "answers", announced=False) as bar, parts.stopping() as asked:
            whole = _work(cfg, part or 0, advance=bar.advance, stopping=asked)
    provenance.write(folder, cfg.values)
    tables.print_lines(f"answers: data=conversations data.conversations={folder / 'rows'}")
    if not whole:
        raise LongtrainError(STOPPED)


def work_part(
    values: Mapping[str, Any],
    number: int,
    tell: parts.Tell,
    asked_to_stop: Callable[[], bool],
) -> None:
    """Answer one part in a process of its own, and report progress to the parent process.

    Args:
        values: all keys of the run.
        number: number of the part.
        tell: reports progress.
        asked_to_stop: returns True if the part is to stop.

    Raises:
        LongtrainError: the part was stopped before its end.
    """
    tell({"total": 0, "before": 0})
    advance = lambda what, done: tell({"what": what, "done": done})  # noqa: E731
    if not _work(RunConfig(values), number, advance=advance, stopping=asked_to_stop):
        raise LongtrainError(STOPPED)


def check(cfg: RunConfig) -> None:
    """Refuse settings that cannot work, before the target is loaded.

    Raises:
        ConfigError: no data or target is chosen, or a value is not allowed.
    """
    _ = cfg.data, cfg.decode
    cfg.target.required_path()
    cfg.answers.part()
    keys = cfg.answers
    bounds = (("document_tokens", "SHORTEST", "LONGEST"), ("turns", "FEWEST", "MOST"))
    for name, least, most in bounds:
        low, high = getattr(keys, name)
        if low > high:
            raise wrong(name, [low, high], f"[{least}, {most}] with {least} <= {most}")
    forms = sorted({form for asked in _forms(keys).values() for form in asked})
    for form in keys.ask_weights or {}:
        if form not in forms:
            raise wrong("ask_weights", form, f"forms of questions: {', '.join(forms)}")
    if not _forms(keys).get("text"):
        raise wrong("ask", {"text": []}, "questions for the kind `text` at least")
    if not _questions(keys).get("text"):
        raise wrong("ask_weights", dict(keys.ask_weights or {}), "a weight above 0 for a form of `ask.text`")


def _forms(keys: AnswersKeys) -> dict[str, dict[str, list[str]]]:
    """Text kind -> form of question -> questions; the form of a question without one is the question."""
    made: dict[str, dict[str, list[str]]] = {}
    for kind, items in keys.ask.items():
        forms = made[kind] = {}
        for item in items:
            for form, texts in ({item: (item,)} if isinstance(item, str) else item).items():
                forms.setdefault(form, []).extend(texts)
    return made


def _questions(keys: AnswersKeys) -> dict[str, WeightedQuestions]:
    """Text kind -> its questions with their weights; kinds without any are left out."""
    from longtrain.data.chat.asked import WeightedQuestions

    made = {kind: WeightedQuestions.of(forms, keys.ask_weights or {}) for kind, forms in _forms(keys).items()}
    return {kind: questions for kind, questions in made.items() if questions.texts}


def _work(
    cfg: RunConfig, number: int, *, advance: Callable[[str, int], None], stopping: Callable[[], bool]
) -> bool:
    """Answer one part of the prompts; returns False if it was stopped before the last."""
    from longtrain.data.chat.asked import Asking
    from longtrain.data.chat.mask import render_next
    from longtrain.jobs.answering.ahead import Ahead
    from longtrain.jobs.answering.batches import AnswerBatches
    from longtrain.jobs.answering.files import AnswerFiles

    keys = cfg.answers
    target = load_target(cfg.target, seed=cfg.seed)
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ConfigError(NO_TOKENIZER)
    most = cfg.decode.max_new_tokens
    room = target.info.max_positions - most
    if room < keys.document_tokens[0]:
        raise ConfigError(
            f"decode.max_new_tokens={most} leaves {room} of the target's {target.info.max_positions} "
            f"positions for a prompt, and document_tokens begins at {keys.document_tokens[0]}; lower one of "
            "them"
        )
    settings = {
        "target": target.info.name,
        "weights": target.info.weights_hash,
        "answer_tokens": most,
        **asdict(cfg.sampling),
    }
    closing = threading.Event()
    asking = Asking(
        cfg.data,
        tokenizer,
        room,
        keys.document_tokens,
        _questions(keys),
        settings,
        keys.shards,
        keys.turns,
        most,
        stopping=lambda: closing.is_set() or stopping(),
    )
    files = AnswerFiles(cfg.run_dir / "answers", settings, part=(number, keys.shards))
    answers = AnswerBatches(
        files,
        partial(_places, cfg, target),
        text=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        render=lambda messages, before, name: render_next(tokenizer, messages, before, name=name),
        ends=frozenset(target.info.eos_ids),
        answer_tokens=most,
        batch=keys.batch,
        advance=advance,
    )
    before = len(files.done)
    if before:
        log.info("answers done before=%d", before)
    try:
        part = _part_of(asking.prompts(), number, keys.shards, keys.prompts)
        with Ahead(part, keys.batch, closing) as prompts:  # a batch is all that is taken at once
            whole = answers.run(prompts, stopping)
    finally:
        files.close()
    if whole and not asking.counts["prompts"]:
        raise DataError(f"the data gives no prompt to answer: {_left_out(asking.counts)}; give other data")
    _report(answers, asking, folder=files.rows)
    speed = {
        "tokens": answers.n_tokens,
        "seconds": answers.seconds,
        "answers": answers.n_answers,
        "tokens_per_s": answers.tokens_per_s,
        "steady_tokens_per_s": answers.steady_tokens_per_s,
    }
    write_files(cfg.run_dir / "answers" / "state", {_speed_file(number, keys.shards): as_json(speed)})
    return whole


def _speed_file(number: int, shards: int) -> str:
    """Name of the file with the speed of a part's last run."""
    return f"speed-{number}-of-{shards}.json"


def _part_of(
    prompts: Iterator[Unanswered], number: int, shards: int, most: int | None
) -> Iterator[Unanswered]:
    """Yield the prompts of one part, which their keys choose, of the first `most`."""
    return (one for one in islice(prompts, most) if int(one.key[-8:], 16) % shards == number)


def _places(cfg: RunConfig, target: Target, most: int, slots: int) -> Places:
    """Make places for `slots` tokens each: at most so many, as `batch_tokens` or the free memory allow.

    Raises:
        NoRoomError: not even one fits.
    """
    import torch

    from longtrain.cache.arena import rounded_slots
    from longtrain.cache.room import GIB, free_bytes
    from longtrain.jobs.answering.places import Places

    info, slots = target.info, rounded_slots(slots)
    each = 2 * info.n_layers * info.n_kv_heads * info.head_dim * target.dtype.itemsize * slots
    tokens, free = cfg.answers.batch_tokens, None
    if tokens is not None:
        fit = tokens // slots
    else:
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
        free = free_bytes(target.device)
        fit = most if free is None else int(CACHE_SHARE * free) // each
    n = max(1, min(most, fit))
    log.info(
        "places=%d (batch=%d) of tokens=%d, KV entries=%.1f GiB%s",
        n,
        cfg.answers.batch,
        slots,
        n * each / GIB,
        "" if free is None else f" of {free / GIB:.1f} GiB free",
    )
    return Places(target, n, slots, cfg.sampling)


def _report_parts(folder: Path, shards: int) -> None:
    """Log the speed of all parts together; they ran at the same time."""
    speeds = [read_json(folder / "state" / _speed_file(number, shards)) for number in range(shards)]
    tokens, seconds = sum(one["tokens"] for one in speeds), max(one["seconds"] for one in speeds)
    log.info(
        "parts=%d answers=%d tokens=%d seconds=%.1f tokens_per_s=%.0f steady_tokens_per_s=%.0f",
        shards,
        sum(one["answers"] for one in speeds),
        tokens,
        seconds,
        tokens / max(seconds, 1e-9),
        sum(one["steady_tokens_per_s"] for one in speeds),
    )


def _report(answers: AnswerBatches, asking: Asking, *, folder: Path) -> None:
    """Log what was written and left out, and where the time went."""
    log.info(
        "answers=%d tokens=%d seconds=%.1f tokens_per_s=%.0f steady_tokens_per_s=%.0f; %d cut at "
        "decode.max_new_tokens, %d blank and left out; %s; folder=%s",
        answers.n_answers,
        answers.n_tokens,
        answers.seconds,
        answers.tokens_per_s,
        answers.steady_tokens_per_s,
        answers.n_cut,
        answers.n_empty,
        _left_out(asking.counts),
        folder,
    )
    log.info("%s", answers.times())


def _left_out(counts: Counter[str]) -> str:
    """Say how much was read and tokenised, and which prompts were left out."""
    read = f"documents={counts['documents']} tokenised characters={counts['characters']}"
    left = ", ".join(f"{counts[key]} {text}" for key, text in LEFT_OUT.items() if counts[key])
    return read + (f", left out: {left}" if left else "")
