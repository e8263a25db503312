"""Say what artifacts are, and whether they verify; nothing is run and no target is loaded."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from longtrain import tables
from longtrain.errors import ArtifactError
from longtrain.jobs.finished import listing
from longtrain.jobs.setup import artifact_names
from longtrain.settings import convert


def run(cfg: DictConfig) -> None:
    """Print what each artifact's files say; without a name, which runs, artifacts and evaluations there are.

    Raises:
        ArtifactError: one does not verify, or is no artifact.
    """
    from longtrain.artifact.inspection import inspect

    if not artifact_names(cfg):
        listing.show_all(Path(cfg.home))
        return
    unverified, faults = convert(cfg.unverified, bool, "unverified"), []
    for name in artifact_names(cfg):
        found = inspect(name, home=str(cfg.home), trained_by=cfg.trained_by, unverified=unverified)
        wide = max(map(len, found.facts))
        verdict = {**found.facts, "verifies": f"{'NO' if found.fault else 'yes'}: {found.facts['verifies']}"}
        tables.say(*(f"{key:<{wide}}  {tables.printable(text)}" for key, text in verdict.items()))
        for one in found.results:
            title = f"{one.title} (suite={one.suite}, {one.target} in {one.dtype}, {one.protocol})"
            tables.say(f"\n{tables.printable(title)}")
            tables.show(one.header, one.rows)
        if found.fault:
            faults.append(f"{name} does not verify: {found.fault}")
    if faults:
        raise ArtifactError("; ".join(faults))
