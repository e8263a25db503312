"""The plan: every example once, in an order that nothing but the settings decides."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.harness.plan import part_of, plan, remaining

from .toys import suite, task


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_every_example_once_in_even_batches(batch):
    for asked in (suite(), suite(task(examples=11))):
        units = plan(asked, batch=batch)
        places = [place for unit in units for place in unit.places]
        every = [(t.name, e.id) for t in asked.tasks for e in t.examples()]
        assert sorted(places) == sorted(every) and len(set(places)) == len(places)
        assert all(1 <= len(unit.examples) <= batch for unit in units)
        assert len({unit.key for unit in units}) == len(units)
        one_task = [unit for unit in units if unit.task is asked.tasks[0]]
        sizes = [unit.task.size(one) for unit in one_task for one in unit.examples]
        assert sizes == sorted(sizes, reverse=True)


def test_the_order_of_rows_does_not_matter():
    one = suite()
    rows = list(one.tasks[0].rows)
    random.Random(1).shuffle(rows)
    other = replace(one, tasks=(replace(one.tasks[0], rows=tuple(rows)), one.tasks[1]))
    assert [unit.key for unit in plan(one, batch=2)] == [unit.key for unit in plan(other, batch=2)]


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_parts_are_the_whole(shards):
    units = plan(suite(), batch=2)
    parts = [part_of(units, shard=number, shards=shards) for number in range(shards)]
    keys = sorted(unit.key for part in parts for unit in part)
    assert keys == sorted(unit.key for unit in units)


def test_what_remains_is_whole_units_unless_the_batch_changed():
    units = plan(suite(), batch=2)
    done = {place for unit in units[:2] for place in unit.places}
    assert [unit.key for unit in remaining(units, done)] == [unit.key for unit in units[2:]]
    other = remaining(plan(suite(), batch=3), done)
    left = {place for unit in other for place in unit.places}
    assert left == {place for unit in units[2:] for place in unit.places}


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(DataError, match="has no example"):
        suite(replace(task(), rows=()))
    rows = task().rows
    with pytest.raises(DataError, match="two examples named 'copy-0'"):
        suite(replace(task(), rows=(*rows, rows[0])))
    with pytest.raises(ConfigError, match="each once"):
        suite(task(), task())
