"""Logging: one line per event, `key=value` with the unit in the key, on rank 0 unless asked."""

import logging
import os


def on_first_rank() -> bool:
    """Return True if this process is rank 0 or the only one, by the launchers' environment variables."""
    return all(int(os.environ.get(key) or 0) == 0 for key in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def first_of_machine() -> bool:
    """Return True if this process is the first rank of its machine, or the only one."""
    return not int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


class _RankZero(logging.Filter):
    """Passes records on rank 0 only, unless the record has `all_ranks=True`."""

    def filter(self, record: logging.LogRecord) -> bool:
        return on_first_rank() or getattr(record, "all_ranks", False)


def get_logger(name: str) -> logging.Logger:
    """Return a module's logger, silent on ranks other than 0 unless `extra={"all_ranks": True}`."""
    logger = logging.getLogger(name)
    if not any(isinstance(f, _RankZero) for f in logger.filters):
        logger.addFilter(_RankZero())
    return logger
