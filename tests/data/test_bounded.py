"""A chat template that never ends, or takes all memory, is refused in time, and later calls go on."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longtrain.data.chat.bounded import Bounded, Failed
from longtrain.data.chat.mask import apply_template
from longtrain.errors import DataError

MESSAGES = [{"role": "user", "content": "hi"}]
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a large power": "{{ 7 ** (10 ** 9) }}",
}
GREEDY = {
    "a long text": "{{ 'a' * (10 ** 11) }}",
    "a long list": "{{ ([1] * (10 ** 11)) | length }}",
    "a wide field": "{{ '%0100000000000d' | format(1) }}",
}


def render(tokenizer, template):
    return apply_template(tokenizer, MESSAGES, name="one", chat_template=template, tokenize=False)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_template_that_never_ends_is_refused(tokenizer, kind, monkeypatch):
    monkeypatch.setattr(Bounded.__call__, "__kwdefaults__", {"seconds": 0.5})
    began = time.monotonic()
    with pytest.raises(DataError, match=r"conversation one: .* was not done after 0\.5 s\); roles are user"):
        render(tokenizer, HOSTILE[kind])
    assert time.monotonic() - began < 10
    assert render(tokenizer, "{{ messages[0].content }}!") == "hi!"


@pytest.mark.parametrize("kind", GREEDY)
def test_a_template_that_takes_all_memory_is_refused(tokenizer, kind):
    with pytest.raises(DataError, match="the chat template refuses it"):
        render(tokenizer, GREEDY[kind])
    assert render(tokenizer, "{{ messages[0].content }}!") == "hi!"


def test_what_the_tokenizer_gives_is_what_it_gives_here(tokenizer):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    options = {"chat_template": template, "tokenize": True, "return_dict": True}
    here = tokenizer.apply_chat_template(MESSAGES, **options)
    found = apply_template(tokenizer, MESSAGES, name="one", **options)
    assert {name: ids_T.tolist() for name, ids_T in found.items()} == {"input_ids": list(here["input_ids"])}
    tokenizer.chat_template = "{{ messages | length }}"
    assert apply_template(tokenizer, MESSAGES, name="one", tokenize=False) == "1"
    tokenizer.chat_template = "other"  # since the process began
    assert apply_template(tokenizer, MESSAGES, name="one", tokenize=False) == "other"


def test_it_holds_no_file_of_this_process(tmp_path):
    """A lock of this process is free when this process lets go of it."""
    with (tmp_path / "lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        call = Bounded(os.getpid)
        child = call()
    with (tmp_path / "lock").open("w") as second:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert child == call() != os.getpid()
    call.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


PARENT = """
import os
from longtrain.data.chat.bounded import Bounded

def work(never_ends):
    while never_ends:
        pass
    return os.getpid()

call = Bounded(work)
print(call(False), flush=True)
call(True, seconds=0.5)
"""


def test_a_call_ends_in_time_though_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        time.sleep(0.1)
        os.kill(child, 0)
        parent.kill()
    until = time.monotonic() + 20
    while running(child) and time.monotonic() < until:
        time.sleep(0.1)
    if running(child):
        os.kill(child, signal.SIGKILL)
        raise AssertionError("it runs on")


def running(process):
    """An orphan that has ended stays listed, as a zombie, where no init process takes note of it."""
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_fails_is_told_in_a_line_and_what_kills_it_too():
    call = Bounded(lambda code: os._exit(1) if code == "end" else int(code))
    with pytest.raises(Failed, match="invalid literal"):
        call("x")
    with pytest.raises(Failed, match="its process ended"):
        call("end")
    assert call("7") == 7
    call.close()


def test_a_call_may_come_long_after_the_limit_of_the_one_before():
    bounded = Bounded(abs)
    assert bounded(-1, seconds=0.2) == 1
    time.sleep(1.5)  # the limit, and the second after which the process would end itself
    child = bounded._child
    assert bounded(-2, seconds=5) == 2 and bounded._child == child
    bounded.close()
