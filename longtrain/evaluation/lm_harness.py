"""Adapter to lm-evaluation-harness (lm-eval): its tasks and requests, its scores, and the model object it
calls.

This module needs the package lm-eval; `evaluation/suites/lm_eval.py` runs the requests on our systems.
"""

from __future__ import annotations

import io
import logging
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longtrain.data.chat.mask import apply_template
from longtrain.errors import ConfigError, DataError

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.metrics import mean
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import evaluate
    from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    raise ConfigError(
        "suite=lm_eval needs the package lm-eval; run: pip install 'longtrain[lm-eval]'"
    ) from None

if TYPE_CHECKING:
    from longtrain.targets.model import Target

VERSION = version("lm-eval")
ROLLING, GENERATE = "loglikelihood_rolling", "generate_until"
FEWSHOT_SEED, PYTHON_SEED, NUMPY_SEED = 1234, 0, 1234
"""The seeds that `lm_eval.simple_evaluate` sets by default."""

Key = tuple[str, int, int]
"""A request's task, document number, and number within the document."""
Pair = tuple[list[int], list[int]]
"""Token ids of a context, and of its continuation, which is scored."""


class RecordedModel(TemplateLM):
    """The model object that lm-eval calls; it returns answers that were recorded before.

    It also encodes requests, exactly as lm-eval's own Hugging Face model does.

    Args:
        target: the frozen model, for its tokenizer and context window.
        answers: the answers to each request, one per repeat.

    Raises:
        ConfigError: the target has no tokenizer, or the tokenizer has no end-of-text token.
    """

    def __init__(self, target: Target, answers: Mapping[Key, Sequence[Any]] | None = None) -> None:
        super().__init__()
        self.tokenizer: Any = target.require_tokenizer()
        self.window = target.info.max_positions
        self.answers = {key: deque(some) for key, some in (answers or {}).items()}
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(f"suite=lm_eval: the tokenizer of target {target.info.name} has no end token")

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for lm-eval's messages."""
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; no begin-of-text token is added if the text starts with one."""
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if not options and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            options = {"add_special_tokens": False}
        return list(self.tokenizer.encode(string, verbose=False, **options))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the tokenizer's chat template."""
        return str(
            apply_template(
                self.tokenizer,
                chat_history,
                name="of the task",
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def pairs(self, request: Instance) -> list[Pair]:
        """The (context, continuation) pairs of a likelihood request: one pair, or a rolling request's
        windows.
        """
        if request.request_type == ROLLING:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.window - 1,
                context_len=1,
            )
            return [make_disjoint_window(window) for window in windows]
        return super().loglikelihood([request], disable_tqdm=True)  # type: ignore[return-value]

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Any]:
        return [(context, scored) for _, context, scored in requests]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """The recorded answers, in the order of the requests."""
        return [self.answers[key_of(request)].popleft() for request in requests]

    loglikelihood_rolling = generate_until = loglikelihood


@dataclass(frozen=True)
class Library:
    """Tasks as lm-eval loads them, with their requests.

    Args:
        loaded: tasks and groups, as returned by `TaskManager.load`.
        limit: maximum number of documents per task; None: all.
        chat: True if requests are rendered with the chat template.
    """

    loaded: Any
    limit: int | None
    chat: bool

    @property
    def tasks(self) -> dict[str, Any]:
        """All tasks that are run, by name, including the members of groups."""
        return dict(self.loaded["tasks"])

    def aggregate(self, model: RecordedModel) -> dict[str, Any]:
        """lm-eval's own results, from recorded answers: `results`, `groups`, `versions`, `n-shot`."""
        for task in self.tasks.values():
            for request in task.instances:
                request.resps, request.filtered_resps = [], {}
        with _quiet():
            found = evaluate(
                model,
                self.loaded,
                limit=self.limit,
                bootstrap_iters=0,  # the harness computes its own intervals
                log_samples=False,
                apply_chat_template=self.chat,
            )
        return {key: found[key] for key in ("results", "groups", "versions", "n-shot") if key in found}


def load(
    names: Sequence[str],
    model: RecordedModel,
    *,
    include: str | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
) -> Library:
    """Tasks with all their requests, as `lm_eval.simple_evaluate` would build them.

    Args:
        names: tasks, groups or tags of lm-eval, or of the folder `include`.
        model: the adapter that encodes requests and renders conversations.
        include: a folder with further tasks in lm-eval's own format.
        fewshot: solved examples in each prompt; None: the task's own number.
        limit: documents of each task, from the first; None: all.
        chat: put requests into the chat template.

    Raises:
        ConfigError: a task does not exist, runs generated code, or needs images or audio.
        DataError: the data of a task cannot be read.
    """
    random.seed(PYTHON_SEED)
    np.random.seed(NUMPY_SEED)
    with _quiet():
        manager = _manager(names, include)
        try:
            loaded = manager.load(list(names))
            for name, task in loaded["tasks"].items():
                _check(name, task)
                own = task.get_config("num_fewshot")
                if (own != 0 and fewshot is not None) or own is None:
                    task.set_config(key="num_fewshot", value=fewshot or 0)
                task.set_fewshot_seed(seed=FEWSHOT_SEED)
                task.build_all_requests(
                    limit=limit,
                    apply_chat_template=chat,
                    chat_template=model.apply_chat_template if chat else None,
                    tokenizer_name=model.tokenizer_name if chat else "",
                )
                vars(task)["build_all_requests"] = lambda **_: (
                    None
                )  # `evaluate` takes these requests as they are
        except ConfigError:
            raise
        except Exception as error:  # lm-eval and datasets raise errors of any type
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise DataError(f"lm-eval cannot load {', '.join(names)}: {reason}") from error
    return Library(loaded, limit, chat)


def key_of(request: Instance) -> Key:
    """The key of a request's answers."""
    return str(request.task_name), int(request.doc_id or 0), int(request.idx)


def generation_of(task: Any) -> dict[str, Any]:
    """A task's generation settings (`max_gen_toks`, `until`, `temperature`) with lm-eval's defaults.

    Raises:
        ConfigError: the documents of the task ask for different settings.
    """
    found = [normalize_gen_kwargs(request.args[1]) for request in task.instances]
    if any(one != found[0] for one in found):
        raise ConfigError(
            f"suite.tasks: the documents of {task.config.task} generate with different settings, which "
            "suite=lm_eval cannot run; leave out the task"
        )
    return dict(found[0])


def cut_answer(text: str, until: Sequence[str]) -> str:
    """A generated text up to the first of the stop strings."""
    return str(postprocess_generated_text(text, list(until), None))


def main_metric(task: Any) -> tuple[str, str]:
    """The metric and the filter of a task's main score: the first of each."""
    return next(iter(task.aggregation())), str(task._filters[0].name)


def score(task: Any, requests: Sequence[Instance], answers: Sequence[Any]) -> float | None:
    """A document's value of the task's main metric; None if that metric is not a mean of values from 0 to 1.

    Args:
        task: an lm-eval task.
        requests: all requests of the document.
        answers: one answer per request.
    """
    metric, name = main_metric(task)
    if task.aggregation()[metric] is not mean or not task.higher_is_better().get(metric, True):
        return None
    copies = [replace(one, resps=[given]) for one, given in zip(requests, answers, strict=True)]
    task._filters[0].apply(copies)
    value = task.process_results(copies[0].doc, [one.filtered_resps[name] for one in copies]).get(metric)
    good = isinstance(value, bool | int | float | np.bool_ | np.number) and 0 <= value <= 1
    return float(value) if good else None


def _manager(names: Sequence[str], include: str | None) -> Any:
    """lm-eval's task index. Its own 14,000 tasks, slow to index, are skipped if `include` has every name."""
    if include is not None and not Path(include).expanduser().is_dir():
        raise ConfigError(f"suite.include={include}: no such folder; pass a folder of lm-eval tasks, or null")
    where = None if include is None else str(Path(include).expanduser())
    manager = TaskManager(include_path=where, include_defaults=False) if where else None
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=where)
    for name in names:
        if name not in manager.all_tasks and not Path(name).is_file():
            near = get_close_matches(name, manager.all_tasks, n=3)
            hint = f"like it: {', '.join(near)}" if near else "`lm-eval ls tasks` lists them"
            raise ConfigError(f"suite.tasks: lm-eval has no task '{name}'; {hint}")
    return manager


def _check(name: str, task: Any) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(f"suite.tasks: {name} runs generated code, which is refused here; leave it out")
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"suite.tasks: {name} needs pictures or sound; leave it out")


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: lm-eval logs only warnings and errors, and draws no progress bars."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
