"""`longtrain eval`: a suite through the harness, acceptance or eviction, or a comparison of finished runs."""

from __future__ import annotations

from omegaconf import DictConfig

from longtrain.errors import ConfigError
from longtrain.jobs import eval_eviction, eval_harness

OTHERS = ("acceptance", "eviction")
"""Suites beside those of `SUITES`: the first is made from more than its own settings, the second has a job of
its own."""


def run(cfg: DictConfig) -> None:
    """Run the suite `cfg.suite.name`, or compare the finished runs that `cfg.compare` names.

    Raises:
        ConfigError: no such suite, or a setting of it is wrong.
        LongtrainError: speculative output is not that of plain decoding (results are written all the same).
    """
    from longtrain.evaluation.suites import SUITES

    if cfg.compare is not None:
        from longtrain.jobs import eval_compare

        eval_compare.run(cfg)
        return
    name = str(cfg.suite.name)
    if name in SUITES or name == "acceptance":
        eval_harness.run(cfg)
    elif name == "eviction":
        eval_eviction.run(cfg)
    else:
        known = ", ".join(sorted({*OTHERS, *SUITES}))
        raise ConfigError(f"eval has no suite '{name}'; known: {known}")
