"""Logging: one line per event, `key=value` with the unit in the key, on rank 0 unless asked."""

import logging
import os


class _RankZero(logging.Filter):
    """Lets records through on rank 0 only, unless the record carries `all_ranks=True`."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) or 0)
        local = int(os.environ.get("LOCAL_RANK", "0") or 0)
        return (rank == 0 and local == 0) or getattr(record, "all_ranks", False)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, silent on ranks other than 0 (pass `extra={"all_ranks": True}` to speak)."""
    logger = logging.getLogger(name)
    if not any(isinstance(f, _RankZero) for f in logger.filters):
        logger.addFilter(_RankZero())
    return logger
