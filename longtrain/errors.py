"""The errors a user can meet. Each message says what is wrong, the value, what is allowed and what to run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


class LongtrainError(Exception):
    """Base of every error that longtrain raises on purpose; the command line prints it as one line.

    A line end or another control character of what it quotes is shown as Python writes it in a string.
    """

    def __str__(self) -> str:
        """The message, in one line."""
        return _CONTROL.sub(lambda found: repr(found[0])[1:-1], super().__str__())


class ConfigError(LongtrainError):
    """A configuration value, key or recipe is wrong."""


class DataError(LongtrainError):
    """A row, file or mask of the data is wrong or missing."""


class ArtifactError(LongtrainError):
    """An artifact or checkpoint on disk is missing, damaged or of another format."""


class TargetMismatchError(LongtrainError):
    """A module meets a target model it was not trained for, or a target that is not supported."""


class ConflictError(LongtrainError):
    """Two parts of one engine claim the same role, or cannot be combined."""


class TrainingError(LongtrainError):
    """Training cannot go on: a loss that is not finite, say."""


class Faults(LongtrainError):  # noqa: N818 (it is several errors)
    """Several faults that were found at once; the command line prints each on a line of its own.

    Args:
        faults: the errors, at least two.
    """

    def __init__(self, faults: Sequence[LongtrainError]) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = tuple(faults)


class Gathered:
    """Collects errors of checks, so that a user is told all of them at once."""

    def __init__(self, faults: Iterable[LongtrainError] = ()) -> None:
        self.faults = list(faults)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Within, an error that longtrain raises on purpose is kept and goes no further."""
        try:
            yield
        except Faults as several:
            self.faults += several.faults
        except LongtrainError as error:
            self.faults.append(error)

    def tell(self) -> None:
        """Raise what was found: one error as it is, several as `Faults`; the same words are told once.

        Raises:
            LongtrainError: there was a fault.
        """
        found = list({str(error): error for error in self.faults}.values())
        if len(found) == 1:
            raise found[0]
        if found:
            raise Faults(found)


def refusal(kind: type[LongtrainError], what: str, allowed: str) -> LongtrainError:
    """An error that says what was given and what is allowed instead."""
    return kind(f"{what}; allowed: {allowed}")


def is_failure(error: BaseException) -> bool:
    """Whether an exception says that something failed, and not that the process is to end.

    Libraries written in Rust (tokenizers, safetensors) "panic" with an exception of a kind of its own.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """What an exception of somebody else's says, in one line; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
