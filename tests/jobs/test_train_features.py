"""`longtrain train features=...`: filled, offline and online runs have one loss curve."""

from __future__ import annotations

import os
import signal

import pytest

from longtrain.errors import ConfigError, DataError
from longtrain.features.shards import FeatureFiles
from longtrain.jobs import train
from longtrain.training import table

STAGES = "data.stages=[{epochs: 3, sequence_tokens: 160, doc_tokens: 160}]"


@pytest.fixture
def run(composed, text, tmp_path):
    """`run(name, *overrides)`: trains, and gives the losses in words."""
    for number in range(6):
        (text / f"story{number}.txt").write_text(
            f"Once there was a {number}; it ran and ran. " * (3 + number // 3)
        )

    def go(name, *overrides, method="longspec"):
        cfg = composed(
            "train",
            f"name={name}",
            f"method={method}",
            "data=text",
            f"data.text={text}",
            "data.min_doc_tokens=8",
            "data.max_doc_tokens=140",
            "data.val_fraction=0.2",
            "data.val_sequences=1",
            STAGES,
            "target.dtype=bfloat16",
            "trainer=cpu",
            "trainer.val_every=2",
            "callbacks.progress=false",
            "callbacks.curves=false",
            "quiet=true",
            f"features.folder={tmp_path}/features",
            *overrides,
        )
        train.run(cfg)
        rows = table.read(tmp_path / "runs" / name / "train" / "metrics.csv")
        return [row["train/loss"] or row["val/loss"] for row in rows]

    return go


def test_one_loss_curve_and_a_target_that_runs_once(run, tmp_path, monkeypatch):
    from longtrain.targets.model import Target

    online, calls, packed = run("online"), [], Target.packed

    def counted(self, *args, **kwargs):
        calls.append(args)
        return packed(self, *args, **kwargs)

    monkeypatch.setattr(Target, "packed", counted)
    filled = run("filled", "features=fill")
    assert len(filled) >= 6 and [float(x) for x in filled] == pytest.approx(
        [float(x) for x in online], rel=2e-3
    )
    assert filled[0] == online[0]  # the same row in bf16, bit for bit
    first = len(calls)
    stored = FeatureFiles(tmp_path / "features").tokens()
    assert run("again", "features=fill") == filled and len(calls) == first
    assert run("offline", "features=offline") == filled and len(calls) == first
    assert FeatureFiles(tmp_path / "features").tokens() == stored
    rows = sum(1 for _ in filled)
    assert first < rows  # documents of later epochs were read


def test_several_hidden_layers_are_stored_for_eagle3(run):
    keys = ("method.depths=2", "method.layers=[0,1]", "trainer.val_every=0")
    online = run("online", *keys, method="eagle3")
    filled = run("filled", *keys, "features=fill", method="eagle3")
    assert [float(x) for x in filled] == pytest.approx([float(x) for x in online], rel=2e-3)
    assert run("offline", *keys, "features=offline", method="eagle3") == filled


def test_a_filling_run_cut_short_goes_on_bit_for_bit(run, tmp_path, monkeypatch):
    from longtrain.methods.longspec.objective import LongSpecObjective

    lean = ("features=fill", "features.form=int8", "features.top_k=16", "trainer.val_every=0")
    whole = run("whole", *lean, f"features.folder={tmp_path}/other")
    original, calls = LongSpecObjective.forward, []

    def forward(self, batch):
        calls.append(batch)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(LongSpecObjective, "forward", forward)
        with pytest.raises(SystemExit):
            run("cut", *lean)
    assert 0 < len(FeatureFiles(tmp_path / "features")) < len(FeatureFiles(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"changed \(features: features.form=int8 .*top_k=16 -> None\)"):
        run("cut", "trainer.val_every=0")
    assert run("cut", *lean) == whole


def test_random_weights_are_drawn_again_where_features_are_read(run):
    words = "target.weights=random", "trainer.max_steps=2", "trainer.val_every=0"
    assert run("filled", "features=fill", *words) == run("offline", "features=offline", *words)


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (
            ["features.mode=sometimes"],
            ConfigError,
            r"features.mode=sometimes; allowed: online, fill, offline",
        ),
        (
            ["features=fill", "features.form=int4"],
            ConfigError,
            "features.form=int4; allowed: bf16, int8, or null",
        ),
        (["features=offline"], ConfigError, "features.folder=.* holds none; fill it first: features=fill"),
        (["features=fill", "features.folder=null"], ConfigError, "features=fill needs a folder"),
        (
            ["features=fill", "method=lookaheadkv", "data.long_documents=truncate"],
            ConfigError,
            "watches every layer.*features=online",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(run, overrides, kind, message):
    with pytest.raises(kind, match=message) as error:
        run("refused", *overrides)
    assert "\n" not in str(error.value)


def test_a_measurement_of_the_target_itself_is_refused_before_the_first_step(run, tmp_path):
    words = "trainer.max_steps=1", "trainer.val_every=0", "method.anchor_offset=true"
    run("filled", "features=fill", *words)
    with pytest.raises(ConfigError, match=r"features=offline loads no layers; .*guard_every of 0"):
        run("guarded", "features=offline", *words)
    assert not (tmp_path / "runs/guarded/train/metrics.csv").exists()
    run("unguarded", "features=offline", "method.guard_every=0", *words)


def test_features_of_other_data_or_rows_are_refused(run, text):
    run("filled", "features=fill", "trainer.max_steps=1", "trainer.val_every=0")
    with pytest.raises(
        DataError, match=r"lack \d+ of \d+ pieces .* of document \w+ \(\d+ tokens\).*features=fill"
    ):
        run("longer", "features=offline")
    with pytest.raises(
        ConfigError, match=r"form=bf16 features.top_k=0, and this run asks for features.form=int8"
    ):
        run("form", "features=offline", "features.form=int8")
    (text / "story9.txt").write_text("Another story. " * 20)
    with pytest.raises(ConfigError, match=r"are of data text .* and this run's data is text"):
        run("data", "features=fill")
