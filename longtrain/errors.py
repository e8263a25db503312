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
