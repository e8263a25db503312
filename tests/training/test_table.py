import pytest

from longtrain.errors import TrainingError
from longtrain.training.table import Table, read


def test_rows_round_trip_bit_for_bit_and_new_columns_join(tmp_path):
    table = Table(tmp_path / "m.csv")
    value = 0.1 + 0.2
    table.append([{"step": 1, "loss": value}])
    table.append([{"step": 1, "val": 2.0}, {"step": 2, "loss": 1e-300}])
    assert (tmp_path / "m.csv").read_text() == (f"step,loss,val\n1,{value!r},\n1,,2.0\n2,1e-300,\n")
    assert float(read(tmp_path / "m.csv")[0]["loss"]) == value


def test_cut_drops_later_rows_and_half_lines(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("step,loss\n1,0.5\n2,0.25\n3,0.125\n4,0.06")
    table = Table(path)
    table.cut(2)
    assert path.read_text() == "step,loss\n1,0.5\n2,0.25\n"
    table.append([{"step": 3, "loss": 0.1}])
    assert path.read_text().endswith("2,0.25\n3,0.1\n")
    table.cut(0)
    assert not path.exists()


def test_a_full_disk_is_one_clear_error(tmp_path):
    path = tmp_path / "m.csv"
    table = Table(path)
    table.append([{"step": 1, "loss": 1.0}])
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(TrainingError, match="No space left on device"):
        table.append([{"step": 2, "loss": 1.0}])
