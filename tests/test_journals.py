"""Every line of a journal is what was written, or is refused by its number."""

import json
import os
import random

import pytest

from longtrain.errors import ConfigError, DataError, LongtrainError
from longtrain.journals import Journal, journals_in, read_journal

LINES = [{"settings": {"seed": 0}}, {"key": "a", "ids": [1, 20, 300]}, {"key": "b", "ids": []}]


def lines_of(path, start=0):
    return [values for _, values in read_journal(path, advice="remove it", start=start)]


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "j.jsonl")
    for values in LINES:
        journal.append(values)
    journal.close()
    return tmp_path / "j.jsonl"


def test_what_is_written_is_read_and_is_still_json(path):
    assert lines_of(path) == LINES and lines_of(path, start=2) == LINES[2:]
    assert [{**json.loads(line), "sha256": None} for line in path.read_text().splitlines()] == [
        {**values, "sha256": None} for values in LINES
    ]


def test_what_json_does_not_have_is_not_written(path):
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        Journal(path).append({"x": float("nan")})
    assert path.read_bytes() == whole


@pytest.mark.parametrize(("old", "new"), [("300", "301"), ("20,", "20.9,"), ('"b"', '"a"'), ("[]", "[7]")])
def test_an_edited_line_is_refused_with_its_number(path, old, new):
    text = path.read_text()
    path.write_text(text.replace(old, new))
    number = 1 + next(i for i, line in enumerate(text.splitlines()) if old in line)
    with pytest.raises(DataError, match=rf"j\.jsonl line {number} cannot be read: .*checksum.*; remove it"):
        lines_of(path)


def test_lines_that_another_program_wrote_again_are_refused(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    again = [json.dumps(line, separators=(",", ":")) + "\n" for line in lines]  # as jq -c does
    path.write_text("".join(again))
    with pytest.raises(DataError, match="line 1 cannot be read: its checksum is missing"):
        lines_of(path)


def test_lines_whose_checksums_were_all_taken_out_are_refused(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["sha256"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match="line 1 cannot be read: its checksum is missing"):
        lines_of(path)


def test_no_bit_that_flips_changes_a_value_that_is_read(path):
    whole, rng = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(400):
        at, bit = rng.randrange(len(whole)), rng.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
        try:
            found = lines_of(path)
        except DataError:
            refused += 1
            continue
        # The last line without its end reads as one that a kill cut short.
        kept = [{key: line[key] for key in own} for own, line in zip(LINES, found, strict=False)]
        assert kept == LINES[: len(found)] and len(found) >= 2
    assert refused > 300


@pytest.mark.parametrize("line", ["[1]", "7", "{", "[" * 100_000, "\u00e9".encode("latin-1")])
def test_what_is_no_object_is_refused(path, line):
    with path.open("ab") as stream:
        stream.write((line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(DataError, match="line 4 cannot be read"):
        lines_of(path)


def test_a_pipe_in_its_place_hangs_nobody(tmp_path):
    os.mkfifo(tmp_path / "j.jsonl")
    with pytest.raises(DataError, match="it is a pipe"):
        lines_of(tmp_path / "j.jsonl")
    with pytest.raises(LongtrainError, match="it is a pipe"):
        Journal(tmp_path / "j.jsonl")


def test_one_process_writes_at_a_time(path):
    journal = Journal(path)
    with pytest.raises(ConfigError, match="is being written by another run"):
        Journal(path)
    journal.close()
    Journal(path).close()


def test_the_journals_of_an_earlier_version_stay_in_their_folder(tmp_path):
    assert journals_in(tmp_path) == tmp_path / "journals"
    (tmp_path / "ledger").mkdir()
    assert journals_in(tmp_path) == tmp_path / "ledger"
