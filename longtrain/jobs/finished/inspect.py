"""Say what artifacts are, and whether they verify; nothing is run and no target is loaded."""

from __future__ import annotations

from omegaconf import DictConfig

from longtrain import tables
from longtrain.errors import ArtifactError, ConfigError
from longtrain.jobs.setup import artifact_names
from longtrain.settings import convert


def run(cfg: DictConfig) -> None:
    """Print what each artifact's files say.

    Raises:
        ConfigError: no artifact is named.
        ArtifactError: one does not verify, or is no artifact.
    """
    from longtrain.artifact.inspection import inspect

    check(cfg)
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


def check(cfg: DictConfig) -> None:
    """Refuse to inspect nothing.

    Raises:
        ConfigError: no artifact is named.
    """
    if not artifact_names(cfg):
        raise ConfigError("nothing to inspect; pass its place: longtrain inspect FOLDER, or hub:ORG/NAME")
