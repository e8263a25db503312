"""`longtrain eval`: a suite through the harness, or a comparison of finished runs."""

from __future__ import annotations

from omegaconf import DictConfig

from longtrain.errors import ConfigError
from longtrain.jobs import eval_harness


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
    if name in SUITES:
        eval_harness.run(cfg)
    else:
        raise ConfigError(f"eval has no suite '{name}'; known: {', '.join(sorted(SUITES))}")
