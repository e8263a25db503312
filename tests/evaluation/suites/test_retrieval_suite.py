"""The suite of recall: the bundled target, rules without training, results and what is refused."""

from __future__ import annotations

import json

import pytest

from longtrain.decoding.evict import Budget
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError
from longtrain.evaluation.analysis.results import assemble
from longtrain.evaluation.analysis.statistics import Bootstrap
from longtrain.evaluation.harness.plan import plan
from longtrain.evaluation.harness.protocol import protocol_of
from longtrain.evaluation.harness.recorded import exempt
from longtrain.evaluation.harness.run import Runner
from longtrain.evaluation.records import Record
from longtrain.evaluation.reporting.pictures import pictures
from longtrain.evaluation.reporting.tables import table
from longtrain.evaluation.suites import retrieval
from longtrain.systems import Builder

SETTINGS = {"lengths": ["128", "256"], "texts": 2, "steps": 3, "text": "bundled", "home": ".", "data": None}


@pytest.fixture
def build(bundled, settings_of):
    def go(*entries, budgets=(80, 120), **changed):
        values = settings_of("retrieval", **{**SETTINGS, **changed})
        suite = retrieval.build(values, bundled, seed=0, sampling=Sampling())
        entries = entries or values["systems"]
        builder = Builder(bundled, [Budget(one) for one in budgets], [], load=None)
        systems = builder.systems(entries, roles=suite.needs, taker="suite retrieval")[1:]
        return suite.meet(suite, systems), systems

    return go


def results_of(suite, systems, target):
    runner = Runner(target, Sampling())
    records = [
        Record.from_json(json.loads(json.dumps(values)))
        for system in systems
        for unit in plan(suite, batch=2)
        for values in runner.unit(system, unit)["records"]
    ]
    protocol, draw = protocol_of(suite, target, Sampling()), Bootstrap(resamples=20)
    return assemble(suite, systems, records, protocol=protocol, target={"name": "t"}, draw=draw), records


def test_rules_as_the_configuration_has_them(build, bundled):
    suite, systems = build(budgets=(80,))
    made, records = results_of(suite, systems, bundled)
    score = {one["family"]: one["average"]["value"] for one in made["systems"]}
    assert set(score) == {
        "window", "random", "quest", "clusterkv", "shadowkv", "previous", "reused", "shared oracle",
        "grouped oracle", "oracle",
    }  # fmt: skip
    assert max(score, key=score.get) == "oracle" and score["oracle"] > score["shared oracle"]
    assert score["shared oracle"] > score["window"] > 0
    closed = {
        one["family"]: one["metrics"]["gap to the shared oracle closed"]["value"] for one in made["systems"]
    }
    assert closed["window"] == 0 and closed["shared oracle"] == pytest.approx(1, abs=0.02)
    for record in records:
        assert record.score == record.measures["far_read"] / record.measures["far_mass"]
    assert exempt(suite)


def test_what_is_shown(build, bundled):
    suite, systems = build({"name": "sparse", "rule": "quest", "label": "quest"})
    assert [system.name for system in systems] == ["quest@80", "quest@120"]
    made, _ = results_of(suite, systems, bundled)
    shown = table(made)
    for words in (
        "## Far recall by layer",
        "| system | layer 0 |",
        "| quest@120 | 256 |",
    ):
        assert words in shown
    assert {name for name, content in pictures(made).items() if content} >= {"budget.png", "figures.png"}


def test_what_is_refused(build):
    with pytest.raises(ConfigError, match="measures what selectors read and none is given"):
        build({"cache": "int8"})
    with pytest.raises(ConfigError, match=r"quest.elastic@80 brings a cache, and suite=retrieval measures"):
        build({"method": {"name": "sparse", "rule": "quest"}, "cache": "elastic"})
    with pytest.raises(ConfigError, match="brings an evictor, which suite retrieval has no use for"):
        build("snapkv")
    with pytest.raises(ConfigError, match=r"suite.lengths=\[64\]; allowed: 69 or more"):
        build(lengths=["64"])
    with pytest.raises(ConfigError, match=r"suite\.lengths"):
        build(lengths=["1m"])
