"""Processes that tokenise may be killed at any moment: nobody waits for them, and nothing stays behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import active_children
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from longtrain.data.read.adapters import Document
from longtrain.data.read.encoder import Encoder
from longtrain.errors import DataError

SECONDS = 10.0
"""Most that may pass between the end of a process and that of the command."""
KILLED = (
    r"^tokenising process \d+ was killed by signal 9, probably for lack of memory; run with fewer than 2 "
    r"such processes: \+\+data\.tokenise_workers=1$"
)


class Tokens:
    """A tokenizer that does what the text says."""

    eos_token_id = None

    def __call__(self, texts, **_):
        for text in texts:
            if text == "sleep":
                time.sleep(60)
            elif text == "be killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif text == "be killed in the middle of the answer":
                Connection._send = send_half
        return {"input_ids": [[7] * 100_000 for _ in texts]}


class Broken:
    """A tokenizer that no process can read."""

    eos_token_id = None

    def __reduce__(self):
        return int, ("x",)


def send_half(pipe, data, **_):
    os.write(pipe.fileno(), data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def batches(*texts):
    """One batch a text, so that each is a process's work of its own."""
    return [[Document(text, "text", text=text)] for text in texts]


def kill(process):
    os.kill(process.pid, signal.SIGKILL)


def runs(pid):
    """True if there is such a process and it has not ended, be it waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("moment", ["be killed", "be killed in the middle of the answer"])
def test_a_process_that_is_killed_ends_all(moment):
    began = time.monotonic()
    with pytest.raises(DataError, match=KILLED), Encoder(Tokens(), workers=2) as encoder:
        list(encoder.batches(batches("be ready", "be ready")))
        began = time.monotonic()
        list(encoder.batches(batches("sleep", moment)))  # the first is waited for when the second dies
    assert time.monotonic() - began < SECONDS and not active_children()


def test_a_process_that_is_killed_while_it_waits_ends_all():
    with pytest.raises(DataError, match=KILLED), Encoder(Tokens(), workers=2) as encoder:
        list(encoder.batches(batches("be ready", "be ready")))
        began = time.monotonic()
        kill(active_children()[0])
        list(encoder.batches(batches(*["go on"] * 8)))
    assert time.monotonic() - began < SECONDS and not active_children()


def test_nothing_is_left_of_data_whose_preparation_is_killed(tokenizer, tmp_path):
    from longtrain.data.packing.prepare import prepare
    from tests.data.test_preparation import config  # slow to import, which no process here should wait for

    def kill_the_first():
        while not active_children():
            time.sleep(0.01)
        kill(active_children()[0])

    (tmp_path / "text.txt").write_text("Some text. " * 100_000)
    threading.Thread(target=kill_the_first).start()
    with pytest.raises(DataError, match=KILLED):
        source = {"text": str(tmp_path / "text.txt")}
        prepare(config(source, tokenise_workers=2), tokenizer, home=tmp_path / "home")
    assert not active_children()
    assert all(path.suffix == ".lock" for path in (tmp_path / "home" / "data").iterdir())


def test_a_process_that_cannot_start_is_told_from_one_that_was_killed():
    said = (
        r"^tokenising process \d+ ended by itself with exit code 1 \(its own message is above\); .*workers=0$"
    )
    with pytest.raises(DataError, match=said), Encoder(Broken(), workers=1) as encoder:
        list(encoder.batches(batches("a")))
    assert not active_children()


def test_signals_of_the_terminal_are_left_to_the_command():
    with Encoder(Tokens(), workers=1) as encoder:
        list(encoder.batches(batches("be ready")))
        (process,) = active_children()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, number)
        assert len(list(encoder.batches(batches("go on")))) == 1 and process.is_alive()


def test_a_process_at_work_ends_with_a_command_that_is_killed(tmp_path):
    """One without work ends because its pipe does."""
    script = tmp_path / "command.py"
    script.write_text(
        "from multiprocessing import active_children\n"
        "from tests.data.test_processes import Encoder, Tokens, batches\n"
        "if __name__ == '__main__':\n"
        "    with Encoder(Tokens(), workers=1) as encoder:\n"
        "        list(encoder.batches(batches('be ready')))\n"
        "        print(active_children()[0].pid, flush=True)\n"
        "        list(encoder.batches(batches('sleep')))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True)
    pid = int(command.stdout.readline())
    time.sleep(0.5)  # until it is at work
    began = time.monotonic()
    command.kill()
    command.wait()  # not for its output, which the process holds open too
    while runs(pid) and time.monotonic() - began < SECONDS:
        time.sleep(0.05)
    assert not runs(pid)
    command.stdout.close()


def test_ctrl_c_does_not_wait_for_the_processes():
    def interrupted():
        yield from batches("sleep", "sleep")
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        yield from batches("sleep", "sleep", "sleep")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored behind a shell's &
    try:
        with pytest.raises(KeyboardInterrupt), Encoder(Tokens(), workers=2) as encoder:
            list(encoder.batches(batches("be ready", "be ready")))
            began = time.monotonic()
            list(encoder.batches(interrupted()))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < SECONDS and not active_children()
