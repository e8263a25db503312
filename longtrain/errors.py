"""The errors a user can meet. Each message says what is wrong, the value, what is allowed and what to run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


class LongtrainError(Exception):
    """Base of every error that longtrain raises on purpose; the command line prints it as one line.

    Line ends and other control characters in quoted values are shown escaped, as in a Python string.
    """

    def __str__(self) -> str:
        """Return the message as one line."""
        return _CONTROL.sub(lambda found: repr(found[0])[1:-1], super().__str__())


class ConfigError(LongtrainError):
    """A configuration value, key or recipe is wrong."""


class DataError(LongtrainError):
    """A record, file or mask of the data is wrong or missing."""


class ArtifactError(LongtrainError):
    """An artifact or checkpoint on disk is missing, damaged or of another format."""


class TargetMismatchError(LongtrainError):
    """A module meets a target model it was not trained for, or a target that is not supported."""


class ConflictError(LongtrainError):
    """Two parts of one engine claim the same role, or cannot be combined."""


class TrainingError(LongtrainError):
    """Training cannot go on, for example because the loss is not finite."""


class Faults(LongtrainError):  # noqa: N818 (several errors in one)
    """Several errors found together; the command line prints one line for each.

    Args:
        faults: the errors, at least two.
    """

    def __init__(self, faults: Sequence[LongtrainError]) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = tuple(faults)


class ConfigFaults(Faults, ConfigError):  # noqa: N818 (as above)
    """Several wrong values; a handler of `ConfigError` handles them as it would handle one."""


class Gathered:
    """Collects the errors of several checks, so that a user sees all of them at once."""

    def __init__(self, faults: Iterable[LongtrainError] = ()) -> None:
        self.faults = list(faults)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Context manager that collects an error raised inside the block instead of passing it on."""
        try:
            yield
        except Faults as several:
            self.faults += several.faults
        except LongtrainError as error:
            self.faults.append(error)

    def raise_all(self) -> None:
        """Raise the collected errors without duplicates: a single one as it is, several as `Faults`, or as
        `ConfigFaults` if all are configuration errors.

        Raises:
            LongtrainError: at least one error was collected.
        """
        found = list({str(error): error for error in self.faults}.values())
        if len(found) == 1:
            raise found[0]
        if found:
            raise (ConfigFaults if all(isinstance(one, ConfigError) for one in found) else Faults)(found)


def refusal(kind: type[LongtrainError], what: str, allowed: str) -> LongtrainError:
    """Build an error that states the given value and what is allowed instead."""
    return kind(f"{what}; allowed: {allowed}")


def missing_package(what: str, package: str) -> ConfigError:
    """Build the error of a missing optional package; the pip extra has the package's name."""
    return ConfigError(f"{what} needs the package {package}; run: pip install 'longtrain[{package}]'")


def is_failure(error: BaseException) -> bool:
    """Return True if an exception is a failure, False if it asks the process to end (Ctrl-C, SystemExit).

    Libraries written in Rust (tokenizers, safetensors) "panic" with an exception type that is no `Exception`.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign exception's message, or its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
