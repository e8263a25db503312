"""What comparing an artifact with its golden outputs has found, as numbers and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from longtrain.errors import ArtifactError

FAR = 1e9

ADVICE = "unverified=true runs it all the same and marks every result"


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        what: gave the numbers that are compared.
        error: relative distance from what was stored; `FAR` where it is larger, or no number.
        limit: the largest that passes.
    """

    what: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the distance is within the limit; what is no number never is, however large the noise."""
        return self.error <= self.limit and self.error < FAR

    @property
    def share(self) -> float:
        """The distance in limits; where none is allowed, 0 for no distance and `FAR` for any."""
        if self.limit == 0:
            return FAR if self.error else 0.0
        return self.error / self.limit

    def __str__(self) -> str:
        passed = "" if self.passed else " FAILED"
        return f"{self.what}: relative error {self.error:.2g}, allowed {self.limit:.2g}{passed}"


@dataclass(frozen=True)
class Verification:
    """The checks of an export or of a load.

    Args:
        checks: all that were made, in their order.
        faults: why the artifact counts as unverified, a sentence each; none: it is verified.
    """

    checks: list[Check] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """The numbers in one line: of each kind of check the one that is nearest to its limit."""
        nearest = max(self.checks[1:], key=lambda check: check.share, default=None)
        shown = [*self.checks[:1], *([nearest] if nearest else [])]
        return "; ".join(map(str, shown))


def refuse(checks: Sequence[Check]) -> None:
    """Refuse what is further off than rounding explains.

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
