"""What a recorded score of the full cache allows, and what is recorded."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from longtrain.errors import LongtrainError
from longtrain.evaluation.analysis.acceptance import ACCEPTANCE
from longtrain.evaluation.harness import recorded
from longtrain.evaluation.harness.protocol import protocol_of
from longtrain.evaluation.suite import Scale

from .toys import suite, task


def results(session):
    """Of finished work."""
    session.work()
    return session.finish().results


@pytest.mark.parametrize(("heat", "fits"), [(0.0, False), (0.8, True)])
def test_a_greedy_score_may_be_a_point_off_and_a_drawn_one_half_the_interval(heat, fits):
    asked = suite(task(temperature=heat))
    entry = {"score": 40.0, "low": 30.0, "high": 50.0, "source": "home"}
    entry["protocol"] = {"decoding": {"temperature": 0.5}}
    assert recorded.compare(asked, entry, 40.9)["status"] == "equal"
    if fits:
        assert recorded.compare(asked, entry, 49.0)["tolerance"] == 10
    else:
        with pytest.raises(LongtrainError, match=r"more than 1\.00 away"):
            recorded.compare(asked, entry, 41.1)


def test_where_the_full_cache_is_always_one_nothing_is_compared_or_recorded(session):
    asked = replace(suite(task()), scale=Scale(ACCEPTANCE, None))
    for settings in ({}, {"check": False}, {"record": True}):
        made = session("one", asked, **settings)
        found = results(made)["baseline"]
        assert found["status"] == "off" and "one token a forward" in found["reason"]
        assert not (made.home / recorded.FILE).exists()


def test_runs_that_record_at_once_lose_nothing(session, tmp_path):
    made = session("one")
    found = recorded.Baselines.load(tmp_path)
    average = {"value": 1.0, "low": 0.0, "high": 2.0}
    asked = [suite(task(examples=count)) for count in range(1, 9)]
    protocols = [protocol_of(one, made.target, made.sampling) for one in asked]

    def add(pair):
        found.record(pair[0], "w", pair[1], average)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, zip(asked, protocols, strict=True)))
    entries = json.loads((tmp_path / recorded.FILE).read_text())["baselines"]
    assert len({entry["rows"] for entry in entries}) == 8


def test_the_name_of_a_target_does_not_depend_on_where_the_run_is_started(
    session, target, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    names = []
    for made_here in (False, True):
        if made_here:
            (tmp_path / "models" / "mine").mkdir(parents=True)
        info = replace(target.info, name="models/mine")
        monkeypatch.setattr(target, "info", info)
        names.append(results(session(f"run{made_here}"))["target"]["name"])
    assert names == ["mine", "mine"]


def test_results_say_which_weights_they_are_for(session, target, monkeypatch):
    assert "source" not in results(session("unknown"))["target"]
    info = replace(target.info, extra={"source": {"hub_revision": "0123abcd"}})
    monkeypatch.setattr(target, "info", info)
    assert results(session("known"))["target"]["source"] == {"hub_revision": "0123abcd"}
