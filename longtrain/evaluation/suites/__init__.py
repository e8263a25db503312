"""The suites that `longtrain eval` runs through its harness, one module each.

A module has `build(settings, target, *, seed, sampling) -> Suite`, of which its docstring says only what is
its own:

    settings: the plain mapping of the group `suite` of the configuration, see conf/suite/NAME.yaml.
    target: the loaded target. Its tokenizer writes the prompts, its window decides how long they may be.
    seed: the run's; most suites draw nothing.
    sampling: how the run decodes.

It raises ConfigError for a wrong setting, and DataError where data are missing or wrong. What the benchmark
is like as it was published stands in a `Published` (`evaluation/published.py`), from which follows what a
result may be called.
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
"""`suite.name` of what measures nothing of the full cache -> what is said where nothing else is given."""
