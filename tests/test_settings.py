"""The one reader of typed settings: what annotations allow, and the one line that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from longtrain.errors import ConfigError, ConfigFaults
from longtrain.former_names import with_new_names
from longtrain.settings import (
    Count,
    Counts,
    Lengths,
    Name,
    Share,
    Text,
    convert,
    one_of,
    parse_tokens,
    read,
    some_of,
)


@dataclass(frozen=True)
class Probe:
    lengths: Lengths
    share: Share = 0.5
    mode: Literal["fast", "exact"] = "exact"
    count: Count | None = None


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a/ ",
        ".",
        "..",
        "../x",
        "a/../b",
        "a/./b",
        "/abs/x",
        "a//b",
        "a/",
        ".hidden",
        "a/.b",
        "a\nb",
        "x" * 201,
    ],
)
def test_names_that_lead_elsewhere_or_are_no_folders_are_refused(name):
    with pytest.raises(ConfigError, match="allowed: a name, or names with / between them"):
        convert(name, Name, "name")


@pytest.mark.parametrize("name", ["x", "sweep/lr-1e-3", "longspec_llama8b.v2", "日本", "a..b", "x" * 200, 7])
def test_names_of_folders_below_another_are_taken(name):
    assert convert(name, Name, "name") == str(name)


def test_all_wrong_values_of_a_group_are_told_together():
    with pytest.raises(ConfigFaults) as found:
        read(Probe, {"lengths": [64], "share": 2.0, "mode": "slow"}, "probe")
    assert [str(error).partition(";")[0] for error in found.value.faults] == [
        "probe.share=2.0",
        "probe.mode=slow",
    ]


def test_values_become_what_their_annotation_says() -> None:
    found = read(Probe, {"lengths": ["2k", 512], "share": 1, "count": 3.0}, "suite")
    assert found == Probe((512, 2048), 1.0, "exact", 3)
    assert isinstance(found.share, float) and isinstance(found.count, int)
    assert convert([], some_of(["a", "b"]), "k") == ("a", "b")
    assert convert(["b", "a"], some_of(["a", "b"]), "k") == ("b", "a")  # as it was given
    assert parse_tokens("1.5k") == 1536


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "suite.lengths is missing; allowed: one or more different token counts"),
        ({"lengths": [512], "sharee": 1}, "unknown key 'suite.sharee'; known: lengths, share, mode, count"),
        ({"lengths": [512, "0.5k"]}, r"suite.lengths=\[512, '0.5k'\]; allowed: one or more different"),
        ({"lengths": [512], "share": 1.5}, "suite.share=1.5; allowed: a number from 0 to 1"),
        ({"lengths": [512], "share": True}, "suite.share=true; allowed: a number"),
        ({"lengths": [512], "mode": "slow"}, "suite.mode=slow; allowed: fast, exact"),
        ({"lengths": [512], "count": 0}, "suite.count=0; allowed: a whole number, 1 or more, or null"),
        ({"lengths": [512], "count": True}, "suite.count=true; allowed: a whole number"),
    ],
)
def test_what_is_not_allowed_is_one_line(values, message) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read(Probe, values, "suite")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [("", Text), ([1, 1], Counts), ([], Counts), ("c", one_of(["a", "b"])), (["c"], some_of(["a", "b"]))],
)
def test_kinds_of_values_refuse_what_they_are_not(value, kind) -> None:
    with pytest.raises(ConfigError, match=r"^key=.*allowed: "):
        convert(value, kind, "key")


def test_settings_of_an_earlier_run_are_read_by_their_names_of_today():
    old = {"data.stages": [{"row_tokens": 512}], "trainer.rows_per_step": 1, "method": {"window": 4}}
    new = {
        "data.stages": [{"sequence_tokens": 512}],
        "trainer.sequences_per_step": 1,
        "method": {"window": 4},
    }
    assert with_new_names(old) == new
