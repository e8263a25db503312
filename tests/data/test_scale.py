"""Large corpora: bounded memory, and several processes that give the same data as one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from longtrain.data.chat import mask as masks
from longtrain.data.chat.bounded import MEMORY
from longtrain.data.packing.prepare import prepare
from longtrain.data.read import encoder as encoder_module
from longtrain.data.read import processes
from longtrain.data.read.adapters import Document
from longtrain.data.read.encoder import Encoder, encode, usual_workers
from longtrain.data.read.kept import KeptText
from longtrain.data.read.processes import Processes
from longtrain.errors import DataError
from tests.data.conftest import TEMPLATE
from tests.data.test_preparation import config
from tests.helpers import PROCESSES

MEGABYTE = 2**20
PREPARE = """
import resource, sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from longtrain.data.config import DataConfig
from longtrain.data.packing.prepare import prepare
from longtrain.data.packing.prepared import Prepared

tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
for name in ("little", "much"):
    values = {"name": name, "sources": [{"text": f"{sys.argv[2]}/{name}"}], "tokenise_workers": 0}
    folder = prepare(DataConfig.parse(values), tokenizer, home=Path(sys.argv[2]))
    data = Prepared.open(folder)
    print(len(data.ids), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.fixture(scope="module")
def words_folder(tmp_path_factory):
    """A tokenizer of long words, so that much text is few tokens and soon tokenised."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("words")
    vocab = {word(i): i for i in range(1000)} | {"<unk>": 1000}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(autouse=True)
def _quick_starts(monkeypatch):
    """Processes start with everything imported, save those of a parent that is killed."""
    monkeypatch.setattr(processes, "get_context", lambda _: PROCESSES)


def word(number):
    return f"{number:03}" + "abcdefghijklmnopqrstuvwxyz" * 2


def write_corpus(folder, megabytes):
    """Files of about a megabyte each, of words in another order in each."""
    folder.mkdir()
    for number in range(megabytes):
        order = np.random.default_rng(number).integers(0, 1000, MEGABYTE // 56)
        (folder / f"{number}.txt").write_text(" ".join(word(i) for i in order))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux alone")
def test_memory_does_not_grow_with_the_corpus(words_folder, tmp_path):
    write_corpus(tmp_path / "little", 3)
    write_corpus(tmp_path / "much", 15)
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(words_folder), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (few, before), (many, after) = ([int(one) for one in line.split()] for line in done.stdout.splitlines())
    assert few == 3 * (MEGABYTE // 56) and many == 5 * few
    assert after - before < 10, (before, after)  # MB; the text is 15 MB


def test_several_processes_give_the_data_of_one(tokenizer, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"Text {number}, é. " * (number + 1))
    one, several = (
        prepare(
            config({"text": str(texts)}, tokenise_workers=workers, append_eos=True),
            tokenizer,
            home=tmp_path / str(workers),
        )
        for workers in (0, 2)
    )
    hashes = [json.loads((folder / "manifest.json").read_text())["sha256"] for folder in (one, several)]
    assert hashes[0] == hashes[1]
    again = config({"text": str(texts)}, tokenise_workers=1, append_eos=True)
    before = (several / "manifest.json").stat().st_mtime_ns
    assert (
        prepare(again, tokenizer, home=tmp_path / "2") == several
    )  # the number of processes changes nothing
    assert (several / "manifest.json").stat().st_mtime_ns == before


def conversations(path, n=230):
    """Rows of which some end without an answer, have a blank one, or are longer than the limit."""
    rows = []
    for number in range(n):
        chat = [
            {"role": role, "content": f"{role} {turn} of {number}, é" * (1 + 9 * (number % 50 == 7))}
            for turn in range(1 + number % 3)
            for role in ("user", "assistant")
        ]
        if number % 40 == 3:
            chat[-1]["content"] = " "
        rows.append({"messages": chat[: len(chat) - (number % 40 == 5)]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


CHATS = [
    {"mask": "template", "max_doc_tokens": 200, "long_documents": "truncate"},
    {"labels": "last_answer", "mask": "prefix", "question": "response", "max_doc_tokens": 200}
    | {"answer_tokens": 40, "long_documents": "truncate"},
]


@pytest.mark.parametrize("values", CHATS)
def test_conversations_are_the_same_from_processes_which_render_them(
    tokenizer, tmp_path, values, monkeypatch
):
    rows, texts = conversations(tmp_path / "rows.jsonl"), tmp_path / "text.txt"
    texts.write_text("Some text.")
    sources = [{"conversations": rows}, {"text": str(texts)}]
    manifests = []
    for workers in (0, 1):
        made = config(*sources, tokenise_workers=workers, min_doc_tokens=4, **values)
        folder = prepare(made, tokenizer, home=tmp_path / str(workers))
        manifests.append(json.loads((folder / "manifest.json").read_text()))
        for name in ("render", "render_prompt"):  # the processes have their own
            monkeypatch.setattr(masks, name, None)
    assert manifests[0]["sha256"] == manifests[1]["sha256"]
    assert manifests[0]["read"] == manifests[1]["read"] and manifests[0]["read"]["kept"] > 200


def test_what_fails_in_a_process_is_told_as_without(tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATE.replace(
        "<|user|>", "{% if '11,' in m['content'] %}{{ raise_exception('no 11') }}{% endif %}<|user|>"
    )
    rows = conversations(tmp_path / "rows.jsonl", 30)
    errors, skipped = [], []
    for workers in (0, 1):
        home = tmp_path / str(workers)
        with pytest.raises(DataError, match="no 11") as error:
            prepare(config({"conversations": rows}, tokenise_workers=workers), tokenizer, home=home)
        errors.append(str(error.value))
        made = config({"conversations": rows}, tokenise_workers=workers, on_error="skip", min_doc_tokens=4)
        skipped.append(json.loads((prepare(made, tokenizer, home=home) / "manifest.json").read_text()))
    assert errors[0] == errors[1] and "rows.jsonl" in errors[0]
    assert skipped[0]["sha256"] == skipped[1]["sha256"] and skipped[1]["read"]["bad"] == 1


def limits(tokenizer, document):
    masks.apply_template(tokenizer, document.messages, name="x", tokenize=False)
    return masks._renderer[1].memory, masks._renderer[1]._child


def test_processes_share_the_memory_of_templates_and_end_theirs(tokenizer):
    chat = Document("a", "chat", messages=({"role": "user", "content": "hi"},))
    with Encoder(tokenizer, workers=2) as encoder:
        [(_, made)] = encoder.batches([[chat]], limits)
        ((memory, child),) = made
        assert memory == MEMORY // 2
    until = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


def test_few_conversations_start_no_process(monkeypatch, tokenizer, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(encoder_module, "Processes", None)
    rows = conversations(tmp_path / "rows.jsonl", 30)
    prepare(config({"conversations": rows}, min_doc_tokens=4), tokenizer, home=tmp_path)
    monkeypatch.setattr(encoder_module, "PARALLEL_CHARS", 1000)
    with pytest.raises(TypeError):
        prepare(config({"conversations": rows}, min_doc_tokens=5), tokenizer, home=tmp_path)


def test_a_bounded_number_of_batches_is_read_ahead(tokenizer):
    read = []

    def batches():
        for number in range(20):
            read.append(number)
            yield [Document(str(number), "text", text="some text"), Document("chat", "chat", messages=())]

    with Encoder(tokenizer, workers=2) as encoder:
        for number, (batch, ids) in enumerate(encoder.batches(batches())):
            assert batch[0].name == str(number) and [one.tolist() for one in ids] == [
                one.tolist() for one in encode(tokenizer, ["some text"])
            ]
            assert len(read) <= number + 5  # two slices for each process, and the batch that was yielded


def test_conversations_do_not_wait_for_text(tokenizer):
    read = []

    def batches():
        yield [Document("first", "text", text="some text")]
        for number in range(50):
            read.append(number)
            yield [Document(str(number), "chat", messages=())]

    for workers in (2, None):
        read.clear()
        with Encoder(tokenizer, workers=workers) as encoder:
            for number, _ in enumerate(encoder.batches(batches())):
                assert len(read) <= number + 20


def test_a_tokenizer_that_fails_in_a_process_is_an_error_in_one_line(tokenizer):
    broken = [[Document("a", "text", text=b"abc")]]  # bytes are no text
    for workers in (0, 1):
        with (
            pytest.raises(DataError, match="the target's tokenizer fails on the text"),
            Encoder(tokenizer, workers=workers) as encoder,
        ):
            list(encoder.batches(broken))


class Started:
    """Stands for the worker processes: tokenises at once, and counts how often processes were started."""

    def __init__(self, started):
        self.started = started

    def __call__(self, tokenizer, workers, begin):
        self.started.append(workers)
        self.tokenizer = tokenizer
        return self

    def submit(self, work, documents, chat):
        done = Future()
        done.set_result(encode(self.tokenizer, [one.text for one in documents]))
        return done

    def close(self):
        pass


def test_text_that_is_ready_is_given_before_more_is_read(monkeypatch, tokenizer):
    monkeypatch.setattr(encoder_module, "Processes", Started([]))
    read = []

    def batches():
        for number in range(9):
            read.append(number)
            yield [Document(str(number), "text", text="some text")]

    with Encoder(tokenizer, workers=4) as encoder:
        for number, _ in enumerate(encoder.batches(batches())):
            assert len(read) == number + 1


def test_streams_that_are_taken_in_turn_share_what_is_read_ahead(monkeypatch, tokenizer):
    class Working(Started):
        def submit(self, *work):
            coming = super().submit(*work)
            coming.done = lambda: False
            return coming

    monkeypatch.setattr(encoder_module, "Processes", Working([]))
    for streams, most in ((1, 12), (3, 4), (99, 1)):
        unread = iter([[Document(str(number), "text", text="some text")] for number in range(20)])
        with Encoder(tokenizer, workers=6, streams=streams) as encoder:
            next(encoder.batches(unread))
        assert len(list(unread)) == 20 - (most + 1)


FEW_CHARS = 80_000


@pytest.mark.parametrize("size", [FEW_CHARS // 4, FEW_CHARS // 2])
def test_processes_start_once_all_sources_together_have_enough_text(monkeypatch, caplog, words_folder, size):
    from transformers import AutoTokenizer

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    started = []
    monkeypatch.setattr(encoder_module, "Processes", Started(started))
    monkeypatch.setattr(encoder_module, "PARALLEL_CHARS", FEW_CHARS)
    tokenizer = AutoTokenizer.from_pretrained(words_folder)
    text = " ".join([word(7)] * (size // 56 + 1))
    source = [[Document("a", "text", text=text)]]
    with caplog.at_level("INFO"), Encoder(tokenizer) as encoder:
        for number in range(3):
            for batch, ids in encoder.batches(source):
                assert batch is source[0] and len(next(ids)) == size // 56 + 1
            assert bool(started) == (size * (number + 1) >= FEW_CHARS)
    assert started == ([4] if size == FEW_CHARS // 2 else [])
    assert f"processes={4 if started else 1}" in caplog.text


class Gate:
    """A process has it only once a file exists."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return passed, (self.path,)


def passed(path):
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, "whoever starts this process waits for it"
        time.sleep(0.01)


class Gated:
    """A tokenizer that does not fit into a pipe, and that a process has only once the gate is open."""

    def __init__(self, gate):
        self.gate, self.filler = gate, b"x" * 2**20


def took():
    return len(encoder_module._tokenizer.filler)


def test_processes_start_beside_each_other(tmp_path):
    """Nobody waits until a process has its tokenizer before the next one is started."""
    processes = Processes(Gated(Gate(tmp_path / "open")), 2, encoder_module._begin)
    coming = [processes.submit(took) for _ in "ab"]
    (tmp_path / "open").touch()
    assert [one.result(timeout=120) for one in coming] == [2**20] * 2
    processes.close()


def test_the_cores_are_shared(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert [usual_workers(n) for n in (1, 3, 6, 7)] == [12, 4, 2, 0]


PARENT = """
import os, sys, time
from multiprocessing import active_children
from transformers import PreTrainedTokenizerFast
from longtrain.data.read.encoder import Encoder
from longtrain.data.read.adapters import Document

if __name__ == "__main__":
    encoder = Encoder(PreTrainedTokenizerFast.from_pretrained(sys.argv[1]), workers=1)
    list(encoder.batches([[Document("a", "text", text="some text")]]))
    print(*[one.pid for one in active_children()], flush=True)
    time.sleep(600)
"""


def test_processes_end_when_their_parent_is_killed(words_folder, tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "parent.py", words_folder], stdout=subprocess.PIPE, text=True
    )
    worker = int(parent.stdout.readline())
    os.kill(worker, signal.SIGTERM)  # left to the parent
    parent.kill()
    try:
        parent.communicate(timeout=60)  # the pipe ends when the worker, which holds it too, has ended
    except subprocess.TimeoutExpired:
        os.kill(worker, signal.SIGKILL)
        raise


def test_a_long_text_is_tokenised_whole(tokenizer):
    long = "abc " * 100_000
    (ids_T,) = encode(tokenizer, [long])
    assert tokenizer.decode(ids_T) == long


def test_text_for_synthetic_sources_is_kept_on_disk(tmp_path):
    kept = KeptText(tmp_path)
    for part in ([1, 2], [3], []):
        kept.add("book", np.array(part, np.int64))
    kept.add("code", np.array([], np.int64))
    streams = kept.streams()
    assert list(streams) == ["book"] and isinstance(streams["book"], np.memmap)
    assert streams["book"].tolist() == [1, 2, 3] and not list(tmp_path.iterdir())


def test_the_number_of_processes_is_a_count():
    from longtrain.errors import ConfigError

    with pytest.raises(ConfigError, match=re.escape("data.tokenise_workers")):
        config({"text": "x"}, tokenise_workers=-1)
