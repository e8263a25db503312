"""The suites that `longtrain eval` runs through its harness, one module each.

Each module has `build(settings, target, *, seed, sampling) -> Suite`; its docstring documents only what is
specific to the suite. The arguments are:

    settings: the group `suite` of the configuration as a plain mapping, see conf/suite/NAME.yaml.
    target: the loaded target. Its tokenizer encodes the prompts, its context window limits their length.
    seed: the run's seed; most suites draw no random numbers.
    sampling: the run's sampling settings.

It raises ConfigError for a wrong setting, and DataError where data are missing or wrong. The published form
of a benchmark is described by a `Published` (`evaluation/published.py`), which determines the title of a
result.
"""

from __future__ import annotations

SUITES: dict[str, str] = {
    "acceptance": "longtrain.evaluation.suites.acceptance",
    "eviction": "longtrain.evaluation.suites.eviction",
    "longbench": "longtrain.evaluation.suites.longbench",
    "ruler": "longtrain.evaluation.suites.ruler",
    "longproc": "longtrain.evaluation.suites.longproc",
    "needle": "longtrain.evaluation.suites.needle",
    "speculation": "longtrain.evaluation.suites.speculation",
    "perplexity": "longtrain.evaluation.suites.perplexity",
    "retrieval": "longtrain.evaluation.suites.retrieval",
    "generated": "longtrain.evaluation.suites.generated",
    "fidelity": "longtrain.evaluation.suites.fidelity",
    "lm_eval": "longtrain.evaluation.suites.lm_eval",
}
"""`suite.name` -> module."""

BROUGHT = {
    "acceptance": "suite=acceptance measures drafts and none is given; pass artifact=NAME, or artifact=[A,B] "
    "to compare several (longtrain eval suite=smoke artifact=checkpoints/mine), or method=quantspec, which "
    "needs no artifact",
    "retrieval": "suite=retrieval measures what selectors read and none is given; pass artifact=NAME, or "
    "suite.systems=[{name: sparse, rule: quest}], which needs no artifact",
}
"""Name of a suite that needs a draft, evictor or selector -> the error message if none is given."""
