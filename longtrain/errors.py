"""The errors a user can meet. Each message says what is wrong, the value, what is allowed and what to run."""


class LongtrainError(Exception):
    """Base of every error that longtrain raises on purpose; the command line prints it as one line."""


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
