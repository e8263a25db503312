"""Results of comparing an artifact with its golden outputs, as numbers and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from longtrain.errors import ArtifactError

FAR = 1e9

ADVICE = "unverified=true runs it all the same and marks every result"

OTHER_STATES = (
    "; it was trained on an engine's states: if the target's hidden states differ (-1: the last layer's), "
    "the engine wrote other layers or ran another target; have it write them again, and train again"
)


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        what: name of the compared values, for messages.
        error: relative distance from the stored values, at most `FAR`, which also stands for NaN.
        limit: largest distance that passes.
    """

    what: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """True if the distance is within the limit; NaN (`FAR`) never passes, whatever the limit."""
        return self.error <= self.limit and self.error < FAR

    @property
    def share(self) -> float:
        """The distance divided by the limit; for a limit of 0, 0 or `FAR`."""
        if self.limit == 0:
            return FAR if self.error else 0.0
        return self.error / self.limit

    def __str__(self) -> str:
        passed = "" if self.passed else " FAILED"
        return f"{self.what}: relative error {self.error:.2g}, allowed {self.limit:.2g}{passed}"


@dataclass(frozen=True)
class Verification:
    """The checks made at export or load.

    Args:
        checks: all checks, in the order they were made.
        faults: reasons why the artifact is unverified, a sentence each; empty: it is verified.
    """

    checks: list[Check] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return one line with the check closest to its limit, of each kind of check."""
        nearest = max(self.checks[1:], key=lambda check: check.share, default=None)
        shown = [*self.checks[:1], *([nearest] if nearest else [])]
        return "; ".join(map(str, shown))


def refuse(checks: Sequence[Check]) -> None:
    """Raise an error if a distance is larger than rounding explains.

    Raises:
        ArtifactError: the first check that fails, with its numbers.
    """
    failed = next((check for check in checks if not check.passed), None)
    if failed is None:
        return
    if checks[0].passed and failed.limit == 0:
        meaning = (
            "by the very scores of the export other entries of the KV cache are chosen, so a setting or a "
            "table of layers is not what was exported"
        )
    elif checks[0].passed:
        meaning = (
            f"the module itself computes what was exported (in fp32 {checks[0].error:.1g}, allowed "
            f"{checks[0].limit:g}), so the target here gives other numbers than rounding explains"
        )
    else:
        meaning = "it does not compute what was exported (position, window, rotary base, weights)"
    raise ArtifactError(
        f"golden outputs are not reproduced by {failed.what}: relative error {failed.error:.2g}, allowed "
        f"{failed.limit:.2g}; {meaning}; export again"
    )
