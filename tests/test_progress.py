"""The time left, the line of a training run and tables in a narrow window."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from longtrain import progress, tables
from longtrain.progress import Pace, Progress
from longtrain.training import callbacks
from longtrain.training.callbacks import ProgressBar


def test_the_time_left_follows_the_last_minute() -> None:
    pace = Pace(0, 0.0)
    assert math.isnan(pace.left_s(100))
    for second in range(1, 101):
        pace.mark(second * 10, float(second))  # 10 a second
    assert pace.left_s(2000) == pytest.approx(100)
    for second in range(101, 201):
        pace.mark(1000 + second - 100, float(second))  # then one a second
    assert pace.left_s(2000) == pytest.approx(900)
    assert pace.left_s(1000) == 0


def test_a_figures_family_keeps_its_name() -> None:
    named = ["head_1", "head_2", "acc_1", "acc_d2", "acc/depth_3", "loss", "bad2"]
    metrics = {f"train/{name}": 0.5 for name in named}
    assert callbacks.short(metrics) == "head 0.500,0.500 acc 0.500,0.500,0.500 loss 0.500 bad 0.500"


def test_a_training_line_keeps_its_steps_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    narrow = Console(file=stream, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(callbacks, "Console", lambda **_: narrow)
    bar = ProgressBar()
    trainer = SimpleNamespace(max_steps=123456, global_step=0, is_global_zero=True)
    bar.on_train_start(trainer, None)
    trainer.global_step = 4567
    bar.on_train_batch_end(trainer, None)
    bar.show(4567, {f"train/figure_of_long_name_{letter}": 1.0 for letter in "abcdef"})
    bar.on_validation_start(trainer, None)
    bar._bar.refresh()
    shown = stream.getvalue().splitlines()
    trainer.num_val_batches = [64]
    bar.on_validation_batch_end(trainer, None, None, None, 11)
    bar._bar.refresh()
    assert "validating 12/64" in stream.getvalue().splitlines()[-1]
    bar.on_train_end(trainer, None)
    assert "4567/123456" in shown[-1] and "validating" in shown[-1] and "figure" in shown[-1]


def test_a_long_name_leaves_the_counts_of_a_bar_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    narrow = Console(file=stream, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("rich.console.Console", lambda **_: narrow)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress(12345, 0, "timed prompts") as progress:
        progress.advance("speed of tiny_longspec tree 4-8-8-8 with a policy @ 128k", 1234)
        progress._bar.refresh()
        line = stream.getvalue().splitlines()[-1]
    assert "1234/12345 timed prompts 0:00:0" in line and "speed of tiny_longspec" in line
    assert "left -:--:--" in line or "left 0:0" in line


def test_what_takes_seconds_is_no_line_of_a_log(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    caplog.set_level("INFO")
    assert list(progress.follow("abc", "answers", total=3, unit="batches")) == ["a", "b", "c"]
    assert not caplog.records
    monkeypatch.setattr(progress.time, "monotonic", iter(range(0, 1000, 20)).__next__)
    assert list(progress.follow("abc", "answers", total=3, unit="batches")) == ["a", "b", "c"]
    told = [record.getMessage() for record in caplog.records]
    assert told == ["answers: batches=2 of=3 left_s=20", "answers: batches=3 of=3 left_s=0"]


def test_a_table_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    header = ["system", *(f"a figure {number}" for number in range(12))]
    tables.show(header, [["full cache", *(f"{number}.123" for number in range(12))]])
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 2 and "…" not in out
    assert [line.rstrip() for line in out.splitlines()] == out.splitlines()
    assert all(f"a figure {number}" in out and f"{number}.123" in out for number in range(12))


def test_columns_that_do_not_fit_come_in_blocks() -> None:
    assert tables.blocks([10, 20, 20, 20], 80) == [[0, 1, 2, 3]]
    assert tables.blocks([10, 20, 20, 20], 50) == [[0, 1, 2], [0, 3]]
    assert tables.blocks([10, 90, 5], 50) == [[0, 1], [0, 2]]
