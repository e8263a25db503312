"""`longtrain inspect`: describe artifacts and verify their files; runs nothing and loads no target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longtrain import tables
from longtrain.errors import ArtifactError
from longtrain.jobs.finished import listing

if TYPE_CHECKING:
    from longtrain.config import RunConfig


def run(cfg: RunConfig) -> None:
    """Print a description of each named artifact; without names, list everything below `home`.

    Raises:
        ArtifactError: one does not verify, or is not an artifact.
    """
    if not cfg.artifacts:
        listing.run(cfg)
        return
    from longtrain.artifact.inspection import inspect

    faults = []
    for name in cfg.artifacts:
        found = inspect(name, home=str(cfg.home), trained_by=cfg.trained_by, unverified=cfg.unverified)
        wide = max(map(len, found.facts))
        verdict = {**found.facts, "verifies": f"{'NO' if found.fault else 'yes'}: {found.facts['verifies']}"}
        tables.print_lines(*(f"{key:<{wide}}  {tables.printable(text)}" for key, text in verdict.items()))
        for one in found.results:
            title = f"{one.title} (suite={one.suite}, {one.target} in {one.dtype}, {one.protocol})"
            tables.print_lines(f"\n{tables.printable(title)}")
            tables.show(one.header, one.rows)
        if found.fault:
            faults.append(f"{name} does not verify: {found.fault}")
    if faults:
        raise ArtifactError("; ".join(faults))
