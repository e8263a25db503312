"""The suite of long texts after short prompts: results by position, and what is refused."""

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
from longtrain.evaluation.suites import generated
from longtrain.systems import Builder

DRAWN = Sampling(temperature=1.0)
QUEST = {"method": {"name": "sparse", "rule": "quest", "page": 4}, "window": 4, "every": 4}
OF_PROMPT = {**QUEST, "method": {**QUEST["method"], "prompt_only": True}, "label": "of the prompt"}


@pytest.fixture
def build(tiny, settings_of, tmp_path):
    def go(*entries, **changed):
        small = {"new_tokens": "32", "prompts": 2, "prompt_tokens": "12", "first_stretch": 8}
        own = {"text": "bundled", "home": str(tmp_path), "data": None}
        values = settings_of("generated", **{**small, **own, **changed})
        suite = generated.build(values, tiny, seed=0, sampling=DRAWN)
        builder = Builder(tiny, [Budget(16)], [], load=None)
        systems = builder.systems(entries, roles=suite.needs, taker="suite generated")
        return suite.meet(suite, systems), systems

    return go


def results_of(suite, systems, target):
    records, runner = [], Runner(target, DRAWN)
    for system in systems:
        for unit in plan(suite, batch=2):
            found = runner.unit(system, unit)["records"]
            records += [Record.from_json(values) for values in json.loads(json.dumps(found))]
    protocol, draw = protocol_of(suite, target, DRAWN), Bootstrap(resamples=20)
    facts = {"name": "t", "strict": True}
    return assemble(suite, systems, records, protocol=protocol, target=facts, draw=draw)


def test_agreement_and_perplexity_by_position(build, tiny, tmp_path):
    suite, systems = build({**QUEST, "label": "quest"}, OF_PROMPT)
    made = results_of(suite, systems, tiny)
    full, quest, _ = made["systems"]
    assert full["average"]["value"] == 100 > quest["average"]["value"] > 0
    assert [one["value"] for one in quest["facets"]] == [8, 16, 32]
    first, last = quest["facets"][0], quest["facets"][-1]
    assert first["score"]["value"] == 100 >= last["score"]["value"]  # a block of 4 beside a budget of 16
    whole = quest["metrics"]
    assert first["metrics"]["perplexity above full, %"]["value"] == pytest.approx(0, abs=1e-4)
    assert whole["perplexity above full, %"]["value"] != pytest.approx(0, abs=1e-4)
    ratio = whole["perplexity"]["value"] / full["metrics"]["perplexity"]["value"]
    assert 100 * (ratio - 1) == pytest.approx(whole["perplexity above full, %"]["value"])
    assert [(one["first"], one["second"]) for one in made["differences"]] == [
        ("quest@16", "of the prompt@16")
    ]
    assert exempt(suite) and len(list((tmp_path / "rollouts").iterdir())) == 2
    shown = table(made)
    for words in (
        "## Agreement by position\n\n| system | 8 | 16 | 32 |",
        "## Perplexity by position",
        "once these fill it, they read the last entries only",
    ):
        assert words in shown
    assert {name for name, content in pictures(made).items() if content} >= {"budget.png", "positions.png"}


def test_what_is_refused(build):
    with pytest.raises(
        ConfigError, match=r"suite\.new_tokens=16384; allowed: fewer than the target's context"
    ):
        build(new_tokens="16k")
    with pytest.raises(ConfigError, match=r"suite\.new_tokens of at most 16284"):
        build(new_tokens="16380", prompt_tokens="100")
    with pytest.raises(ConfigError, match="brings a draft, which suite generated has no use for"):
        build({"name": "prompt_lookup"})
