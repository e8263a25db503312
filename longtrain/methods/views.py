"""Views that a draft is trained in: which of them there are, and which one each document of a row gets.

Imports no torch before a view other than `full` is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

from longtrain.log import get_logger
from longtrain.methods.named import Named, named
from longtrain.settings import wrong

if TYPE_CHECKING:
    from torch import Tensor

    from longtrain.data.rows.batch import Batch
    from longtrain.methods.policies.base import BasePolicy

KEY = "method.views"
FULL = "full"
ALLOWED = (
    "full, {policy: NAME, budget: ROWS} (a number of rows, or a share of the prompt up to 1.0), "
    "{cache: NAME}; NAME may be {name: NAME, option: value}"
)
EARLIEST, LATEST = 0.25, 0.95
"""A document without a prompt is cut at a drawn share of its tokens between these two.

What lies before the cut is read as a prompt. For example, a document of 1000 tokens whose drawn share is 0.4
is evicted after its first 400 tokens, and the 600 others are read over what is left of them.
"""

log = get_logger(__name__)


@dataclass(frozen=True)
class View:
    """How the target holds what a document begins with while it reads the rest.

    Args:
        policy: an eviction policy, applied where the prompt ends.
        budget: how many rows of the prompt it keeps: an int is their number, a float up to 1.0 their share.
        cache: a cache by its name.
    """

    policy: Named | None = None
    budget: int | float | None = None
    cache: Named | None = None

    @cached_property
    def evictor(self) -> BasePolicy | None:
        """The policy with its budget; None where nothing is evicted.

        Raises:
            ConfigError: no such policy or option, a value that is not allowed, or fewer rows than it keeps in
                any case.
        """
        if self.policy is None:
            return None
        from longtrain.decoding.evict import Budget
        from longtrain.methods import policies

        share = isinstance(self.budget, float)
        budget = Budget(ratio=self.budget) if share else Budget(tokens=self.budget)  # type: ignore[arg-type]
        evictor = policies.make(self.policy.name, budget, self.policy.options, group=KEY)
        if budget.tokens is not None and budget.tokens < evictor.least_budget:
            least = f"{evictor.least_budget} or more: {evictor.name} keeps as many in any case"
            raise wrong(f"{KEY}: budget", self.budget, least)
        return evictor


def views_of(values: Any) -> tuple[View | None, ...]:
    """The views of `method.views`; None is the full cache.

    Raises:
        ConfigError: it is no list or an empty one, or an entry is wrong.
    """
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise wrong(KEY, values, f"a list of {ALLOWED}")
    views = [None if value == FULL else _view(value) for value in values]
    return tuple(views[views.index(view)] for view in views)  # equal entries are one object


def has_views(config: Any) -> bool:
    """Whether a method's settings name more than the full cache (`MethodSpec.has_views`)."""
    return any(view != FULL for view in config.views)


def _view(value: Any) -> View:
    if not isinstance(value, Mapping) or not {*value} <= {"policy", "budget", "cache"}:
        raise wrong(f"{KEY}: entry", value, ALLOWED)
    policy, cache = (named(key, value.get(key), KEY) for key in ("policy", "cache"))
    budget = value.get("budget")
    if (policy is None) == (cache is None) or (policy is None) != (budget is None):
        raise wrong(f"{KEY}: entry", value, ALLOWED)
    whole = type(budget) is int and budget >= 1
    if policy is not None and not whole and not (type(budget) is float and 0 < budget <= 1):
        raise wrong(f"{KEY}: budget", budget, "rows of 1 or more, or a share of the prompt above 0, up to 1")
    view = View(policy, budget, cache)
    _ = view.evictor  # refuses what is wrong
    if cache is not None:
        from longtrain.cache.named import options_of

        options_of(cache.name, cache.options)
    return view


@dataclass(frozen=True)
class Drawn:
    """A document that is read in a view.

    Args:
        view: which.
        start: the packed row's first row that is read over the view's cache; those before are its prompt.
        changed: the packed row's first row that is read over a cache that lost or quantised something; where
            no row of the document is, the one past its last.
    """

    view: View
    start: int
    changed: int


def draw(views: Sequence[View | None], batch: Batch) -> dict[int, Drawn]:
    """Draw a view for each document of a row, from the row's seed; documents read in full are left out.

    A document's prompt is what comes before its first label. One that is learned from its second token on has
    none, and is cut at a drawn place. A document is read in full, whatever is drawn, where it has no labels,
    fewer than two tokens behind its prompt, or a prompt of which the policy's budget keeps fewer rows than
    the policy needs.

    Logs a warning, once in a process, where views were drawn for documents of a row and change none of them.
    """
    if not any(views):
        return {}
    import torch

    from longtrain.data.rows.packed_rows import stream

    documents = len(batch.bounds) - 1
    coins = stream(batch.seed, 3)
    chosen = torch.randint(len(views), (documents,), generator=coins).tolist()
    shares = torch.rand(documents, dtype=torch.float64, generator=coins).tolist()
    mask_T = batch.loss_mask_T.cpu() if batch.host_mask_T is None else batch.host_mask_T
    found: dict[int, Drawn] = {}
    tried = changed = 0
    for d, (a, b) in enumerate(pairwise(batch.bounds)):
        view, labels = views[chosen[d]], mask_T[a:b].nonzero()[:, 0]
        if view is None or not len(labels):
            continue
        tried += 1
        prompt = int(labels[0])
        if prompt == 1:
            prompt = int((b - a) * (EARLIEST + (LATEST - EARLIEST) * shares[d]))
        if prompt >= 1 and b - a - prompt >= 2 and _takes(view, prompt):
            found[d] = Drawn(view, a + prompt, int(min(a + _first_changed(view, prompt), b)))
            changed += found[d].changed < b
    if tried and not changed:
        _warn_of_no_effect()
    return found


@cache
def _warn_of_no_effect() -> None:
    """Log it the first time; later calls do nothing."""
    log.warning(
        "%s changes no document of a row: a policy changes none whose prompt is within its budget, or of "
        "which the budget is fewer rows than it keeps in any case; a quantised cache changes none of up to "
        "256 tokens; if in_views stays 0 in the metrics, change the budget or train on longer documents",
        KEY,
    )


def in_views(label_Y: Tensor, batch: Batch, drawn: Mapping[int, Drawn]) -> int:
    """How many labels are predicted from rows that were read over an evicted or quantised cache.

    A label is predicted from the row before it. Documents whose view evicts and quantises nothing count none.

    Args:
        label_Y: the labels' places in the packed row, on the host.
        batch: the row.
        drawn: its documents in a view.
    """
    ends = [(one.changed, batch.bounds[d + 1]) for d, one in drawn.items()]
    return sum(int(((label_Y > start) & (label_Y < stop)).sum()) for start, stop in ends)


def _first_changed(view: View, prompt: int) -> float:
    """How many tokens of a document are committed when a step first reads changed rows; infinite: never."""
    if view.evictor is not None:
        return prompt if view.evictor.budget.of(prompt) < prompt else inf
    from longtrain.kernels.hierarchical.layout import BLOCK

    return max(prompt, 2 * BLOCK)  # the newest whole block is not quantised yet (`KVCache.old_positions`)


def _takes(view: View, prompt: int) -> bool:
    """Whether a prompt of so many tokens can be held in a view."""
    evictor = view.evictor
    if evictor is None:
        return True
    rows = evictor.budget.of(prompt)
    return rows >= min(prompt, evictor.least_budget)
