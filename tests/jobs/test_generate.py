from __future__ import annotations

import io
import os
import threading
from types import SimpleNamespace

import pytest
from byte_tokens import said

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.decoding.engine import Engine
from longtrain.decoding.stats import Stats
from longtrain.errors import ArtifactError, ConfigError, ConflictError, DataError
from longtrain.jobs import generate, train
from longtrain.methods.lookaheadkv import config as lookaheadkv
from longtrain.methods.lookaheadkv.modules import LookaheadKV
from longtrain.targets.loading import load_target

NEW = ("decode.max_new_tokens=20",)


@pytest.fixture
def plain_text(target_folder):
    """What plain decoding says."""
    target = load_target(target_folder)

    def text(prompt, n=20):
        ids = target.tokenizer(prompt).input_ids
        return Engine(target).generate([ids], max_new_tokens=n).texts[0]

    return text


def test_text_then_one_line_of_statistics(composed, plain_text, capsys):
    generate.run(composed("generate", *NEW, "prompt=hello there"))
    text, statistics = said(capsys)
    assert text == plain_text("hello there")
    assert statistics.startswith("[20 tokens after 11 | ") and "tokens/s" in statistics
    assert "τ" not in statistics and "cache" in statistics and statistics.endswith(" MB]")


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ((), "at most 70 entries read a step (evict.budget_tokens) |"),
        (("select.every=4",), "at most 73 entries read a step (evict.budget_tokens, select.every) |"),
        (("select.dense_layers=[1]",), "(evict.budget_tokens), all in layers 1 (select.dense_layers) |"),
    ],
    ids=str,
)
def test_the_statistics_say_how_many_rows_a_step_reads(words, read, composed, target_folder, capsys):
    chosen = ("method=sparse", "evict.budget_tokens=70", *words)
    generate.run(composed("generate", *NEW, "prompt=hello there", *chosen))
    assert read in said(capsys)[1]


@pytest.mark.parametrize("words", [(), ("decode=tree", "decode.shape=[3,4,2]", "decode.keep=5")], ids=str)
def test_a_draft_changes_the_statistics_only(words, composed, artifact, plain_text, capsys):
    generate.run(composed("generate", *NEW, "prompt=hello there", "artifact=draft", *words))
    text, statistics = said(capsys)
    assert text == plain_text("hello there")
    assert "acceptance length τ 1." in statistics and "draft 0." in statistics


def test_a_shape_that_is_found_gives_the_text_of_plain_decoding(composed, artifact, plain_text, capsys):
    """What is tried depends on times: `tests/decoding/test_control.py` holds the rule to its own clock."""
    words = ("prompt=hello there", "artifact=draft", "decode=auto", "decode.menu=[[1,1],[2,4]]")
    generate.run(composed("generate", *NEW, *words))
    text, _ = said(capsys)
    assert text == plain_text("hello there")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("decode=auto", "decode.menu=[[1,0]]"), r"decode.menu=\[\[1, 0\]\]; allowed: .* 1 or more"),
        (("decode=auto", "decode.menu=4"), "decode.menu=4; allowed: a list"),
        (("decode.menu=[[1,1]]",), r"a menu is for decode.shape=auto"),
        (("decode=auto", "decode.keep=4"), "decode.keep=4 and decode.shape=auto"),
        (("decode=tree", "decode.keep=0"), "decode.keep=0; allowed: a whole number, 1 or more"),
        (
            ("decode=auto", "decode.children=beam"),
            "decode.children=beam; allowed: auto, point, iid, no_replace",
        ),
    ],
)
def test_menus_that_are_none(words, complaint, composed, artifact):
    with pytest.raises(ConfigError, match=complaint):
        generate.run(composed("generate", *NEW, "prompt=hello there", "artifact=draft", *words))


def test_eviction_to_a_budget_and_what_it_saves(composed, plain_text, capsys):
    prompt = "it was a dark and stormy night; the rain fell in torrents" * 4
    evict = ["evict=snapkv", "evict.budget_tokens=48", "evict.window=16"]
    generate.run(composed("generate", *NEW, f"prompt='{prompt}'", *evict))
    text, statistics = said(capsys)
    assert f"kept 48 of {len(prompt)} entries | cache 0." in statistics and statistics.endswith(" before]")
    small, whole = (float(word) for word in statistics.rpartition("cache ")[2].split()[:3:2] if word != "MB,")
    assert small < whole / 2 and text != plain_text(prompt)
    generate.run(composed("generate", *NEW, f"prompt='{prompt}'", "evict=snapkv", "evict.budget_tokens=999"))
    text, statistics = said(capsys)
    assert text == plain_text(prompt) and "kept" not in statistics


def test_the_bundled_target_with_half_of_its_prompt(composed, capsys):
    call = [*NEW, "target.path=tiny", "prompt='" + "The quick brown fox jumps over the lazy dog. " * 20 + "'"]
    ratio = ["evict=snapkv", "evict.budget_tokens=null", "evict.budget_ratio=0.5"]
    generate.run(composed("generate", *call, *ratio))
    text, statistics = said(capsys)
    kept, total = (int(statistics.split("kept ")[1].split()[at]) for at in (0, 2))
    assert text and kept == total // 2 and f"after {total} " in statistics


def test_an_eviction_artifact_takes_adaptive_budgets(composed, target_folder, tmp_path, capsys):
    target, config = (
        load_target(target_folder),
        lookaheadkv.Config(n_lookahead=4, lora_rank=2, lora_alpha=4.0),
    )
    module = LookaheadKV(config, target.info)
    Artifact.from_module("lookaheadkv", config, module=module, target=target).save(
        tmp_path / "checkpoints" / "evict"
    )
    prompt = "it was a dark and stormy night; the rain fell in torrents" * 2
    asked = [*NEW, f"prompt='{prompt}'", "artifact=evict", "evict.budget_tokens=24"]
    for adaptive in ("null", "false", "heads", "layers"):
        generate.run(composed("generate", *asked, f"evict.adaptive={adaptive}"))
        assert f"kept 24 of {len(prompt)} entries" in said(capsys)[1]


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("lookaheadkv", lookaheadkv.Config(n_lookahead=4, lora_rank=2, lora_alpha=4.0)),
        ("kvzap", methods.get("kvzap").config()),
    ],
)
def test_an_eviction_artifact_has_a_budget_where_none_is_given(
    composed, target_folder, tmp_path, capsys, method, config
):
    target = load_target(target_folder)
    module = methods.get(method).build(config, target.info)
    made = Artifact.from_module(method, config, module=module, target=target)
    made.save(tmp_path / "checkpoints" / "joint" / method)  # as a run that trains several methods has it
    prompt = "it was a dark and stormy night; the rain fell in torrents" * 3
    asked = [*NEW, f"prompt='{prompt}'", f"artifact=joint/{method}"]
    generate.run(composed("generate", *asked))
    default, statistics = (line for line in capsys.readouterr().err.splitlines() if line)
    assert "evict.budget_tokens=128, since none is given" in default
    assert f"kept 128 of {len(prompt)} entries" in statistics
    generate.run(composed("generate", *asked, "evict.budget_ratio=0.5"))
    (statistics,) = (line for line in capsys.readouterr().err.splitlines() if line)
    assert f"kept {len(prompt) // 2} of {len(prompt)} entries" in statistics


def test_a_draft_on_an_evicted_cache_changes_nothing(composed, artifact, capsys):
    prompt = "it was a dark and stormy night; the rain fell in torrents" * 4
    evict = [f"prompt='{prompt}'", "evict=streaming_llm", "evict.budget_tokens=40"]
    generate.run(composed("generate", *NEW, *evict))
    plain, _ = said(capsys)
    generate.run(composed("generate", *NEW, *evict, "artifact=[draft]"))
    text, statistics = said(capsys)
    assert text == plain and "kept 40 of" in statistics and "draft 0." in statistics


def test_two_drafts_are_one_too_many(composed, artifact):
    with pytest.raises(ConflictError, match="'longspec' and 'longspec' both bring the engine's draft"):
        generate.run(composed("generate", *NEW, "prompt=a", "artifact=[draft,draft]"))


def test_the_target_of_an_artifact_is_found_here_and_named_only_elsewhere(
    composed, artifact, target_folder, plain_text, capsys
):
    uploaded = b"".join((artifact / name).read_bytes() for name in ("longtrain.json", "README.md"))
    assert str(target_folder).encode() not in uploaded and target_folder.name.encode() in uploaded
    call = [*NEW, "prompt=hello there", "artifact=draft", "target.path=null"]
    generate.run(composed("generate", *call))
    assert capsys.readouterr().out.startswith(plain_text("hello there"))
    (artifact / "local.json").unlink()  # as after a download
    with pytest.raises(ConfigError, match=f"target.path={target_folder.name} does not exist"):
        generate.run(composed("generate", *call))


def test_prompt_file_and_chat_template(composed, tmp_path, plain_text, capsys):
    (tmp_path / "p.txt").write_text("hé")
    generate.run(composed("generate", *NEW, f"prompt_file={tmp_path / 'p.txt'}", "chat=true"))
    assert capsys.readouterr().out.startswith(plain_text("<user>hé<bot>"))


@pytest.mark.parametrize("how", ["file", "pipe", "stdin"])
def test_a_prompt_keeps_its_line_ends_and_has_no_byte_order_mark(tmp_path, monkeypatch, how):
    content = b"\xef\xbb\xbfone\r\ntwo\rthree\n"
    (tmp_path / "p.txt").write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    out, into = os.pipe()
    os.write(into, content)
    os.close(into)
    where = {"file": tmp_path / "p.txt", "pipe": f"/dev/fd/{out}", "stdin": "-"}[how]
    assert generate.read_prompt(where) == "one\r\ntwo\rthree\n"
    os.close(out)


def test_a_chat_model_is_asked_what_is_typed(composed, tmp_path, plain_text, capsys, monkeypatch):
    """Without its template such a model ends the text at once; a file's text is continued as it is."""
    monkeypatch.setattr(generate, "chats", lambda tokenizer: True)
    (tmp_path / "p.txt").write_text("hello")
    asked, raw = plain_text("<user>hello<bot>"), plain_text("hello")
    assert asked != raw
    for words, text, aside in (
        (["prompt=hello"], asked, True),
        (["prompt=hello", "chat=false"], raw, False),
        ([f"prompt_file={tmp_path / 'p.txt'}"], raw, False),
    ):
        generate.run(composed("generate", *NEW, *words))
        out, err = capsys.readouterr()
        assert out == text + "\n" and err.count("chat=false continues it as text") == aside
    with pytest.raises(ConfigError, match="chat=maybe; allowed: auto, true, false"):
        generate.check(composed("generate", "prompt=hello", "chat=maybe"))


def test_a_text_that_ends_at_once_is_told_of(composed, capsys, monkeypatch):
    monkeypatch.setattr(generate, "chats", lambda tokenizer: True)
    monkeypatch.setattr(Engine, "generate", _nothing)
    generate.run(composed("generate", *NEW, "prompt=hello", "chat=false"))
    assert "ended the text at once; chat=true" in capsys.readouterr().err


def _nothing(self, prompts, **_):
    return SimpleNamespace(texts=[""], stats=Stats(prompt_tokens=[5], output_tokens=[1]))


def test_the_prompt_may_be_piped_in(composed, plain_text, capsys, monkeypatch):
    piped = io.TextIOWrapper(io.BytesIO(b"hello there"), encoding="ascii")
    monkeypatch.setattr("sys.stdin", piped)
    generate.check(composed("generate", "prompt_file=-"))  # reads nothing
    generate.run(composed("generate", *NEW, "prompt_file=-"))
    assert said(capsys)[0] == plain_text("hello there")


def test_a_pipe_in_place_of_a_file_is_read_once(composed, plain_text, capsys):
    """What a shell makes of `<(command)`: whoever reads it twice finds it empty."""
    out, into = os.pipe()
    os.write(into, b"hello there")
    os.close(into)
    words = composed("generate", *NEW, f"prompt_file=/dev/fd/{out}")
    generate.check(words)
    generate.run(words)
    os.close(out)
    assert said(capsys)[0] == plain_text("hello there")


def test_a_pipe_that_nobody_writes_to_is_said_to_be_waited_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generate, "PATIENCE_MS", 20)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    waiting = threading.Event()
    monkeypatch.setattr("sys.stderr.flush", waiting.set)

    def write():
        waiting.wait()
        pipe.write_text("hello\nthere")

    writer = threading.Thread(target=write)
    writer.start()
    assert generate.read_prompt(pipe) == "hello\nthere"
    writer.join()
    assert f"waiting for prompt_file={pipe}, a pipe to which nothing is written" in capsys.readouterr().err


def test_a_terminal_shows_the_prompt_first(composed, plain_text, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    generate.run(composed("generate", *NEW, "prompt=hello there"))
    assert said(capsys)[0] == f"\x1b[2mhello there\x1b[0m{plain_text('hello there')}"


def test_stop_strings_are_not_printed(composed, plain_text, capsys):
    whole = plain_text("abc")
    stop = whole[4:6]
    generate.run(
        composed("generate", *NEW, "prompt=abc", f"stop=['{stop}']" if "'" not in stop else "stop=[]")
    )
    text, _ = said(capsys)
    assert text == whole[: whole.find(stop)]


class Terminal(list):
    """A tokenizer of one character a token, with a two-token character."""

    parts = {1: "a", 2: "b", 3: "\ufffd", 4: "c"}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.parts[i] for i in ids).replace("\ufffd\ufffd", "é")


def test_whole_characters_in_colours(capsys):
    target = type("T", (), {"tokenizer": Terminal()})
    writer = generate.TextWriter(target, colour=True)
    writer(0, [1, 2], [True, False])
    assert capsys.readouterr().out == "\x1b[32ma\x1b[0mb"
    writer(0, [3], [True])
    assert capsys.readouterr().out == ""
    writer(0, [3, 4, 4], [True, True, False])
    assert capsys.readouterr().out == "\x1b[32méc\x1b[0mc"
    writer.close("abécc")
    assert capsys.readouterr().out == ""


def test_special_tokens_are_printed_as_in_the_text(capsys, target_folder):
    tokenizer = load_target(target_folder).tokenizer
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>", "pad_token": "<|im_end|>"})
    ids = tokenizer("Hello there<|endoftext|> my friend").input_ids
    writer = generate.TextWriter(type("T", (), {"tokenizer": tokenizer}), colour=False)
    writer(0, ids, [False] * len(ids))
    writer.close(tokenizer.decode(ids, skip_special_tokens=False))
    assert capsys.readouterr().out == "Hello there<|endoftext|> my friend"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")  # what ends the text is no part of it
    writer = generate.TextWriter(type("T", (), {"tokenizer": tokenizer}), colour=False, ends=(end,))
    writer(0, [*ids, end], [False] * (len(ids) + 1))
    writer.close(tokenizer.decode(ids, skip_special_tokens=False))
    assert capsys.readouterr().out == "Hello there<|endoftext|> my friend"


def test_what_may_be_a_stop_string_waits(capsys):
    target = type("T", (), {"tokenizer": Terminal()})
    writer = generate.TextWriter(target, colour=False, stop=["zz"])
    writer(0, [1, 2, 4, 1], [False] * 4)
    assert capsys.readouterr().out == "ab"
    writer.close("abc")
    assert capsys.readouterr().out == "c"


@pytest.mark.parametrize(("stop", "printed"), [(["f"], "ab"), (["un", "zzzz"], "abf"), (["bf", "n"], "a")])
def test_nothing_from_a_stop_string_on_is_printed(capsys, stop, printed):
    """Also where one token holds the stop string and more, and whatever the engine still hands over."""
    tokenizer = type("Long", (Terminal,), {"parts": {1: "a", 2: "b", 3: "fun"}})()
    writer = generate.TextWriter(type("T", (), {"tokenizer": tokenizer}), colour=False, stop=stop)
    for token in (1, 2, 3, 1, 2):
        writer(0, [token], [False])
    assert printed.startswith(capsys.readouterr().out)
    whole = generate.TextWriter(type("T", (), {"tokenizer": tokenizer}), colour=False, stop=stop)
    whole(0, [1, 2, 3, 1, 2], [False] * 5)
    whole.close(printed)
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("stop", ["foo", "[foo]"])
def test_one_stop_string_needs_no_list(composed, stop):
    assert composed("generate", f"stop={stop}").generate.stop == ("foo",)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ((), ConfigError, "pass either prompt=TEXT or prompt_file=FILE"),
        (("prompt=a", "prompt_file=b"), ConfigError, "pass either"),
        (("prompt_file=/no/file",), DataError, "prompt_file=/no/file cannot be read"),
        (
            ("prompt=a", "method=longspec"),
            ConfigError,
            "^method=longspec needs trained weights, and artifact=null; pass artifact=NAME, or leave",
        ),
        (("prompt=a", "method=lookaheadkv"), ConfigError, "method=lookaheadkv needs trained weights"),
        (("prompt=a", "method=pretrain"), ConfigError, "method=pretrain brings nothing to decode with"),
        (("prompt=a", "stop=['']"), ConfigError, r"stop=\[''\]; allowed: a string, or a list of strings"),
        (("prompt=a", "artifact=none"), ArtifactError, "no artifact 'none'"),
        (("prompt=a", "artifact=[x,y]"), ArtifactError, "no artifact 'x'"),
        (("prompt=a", "artifact=[x,3]"), ConfigError, "a list of names such as"),
        (("prompt=a", "evict.budget_tokens=8"), ConfigError, "budget of 8 and nothing that evicts"),
        (("prompt=a", "evict=snapkv", "evict.budget_tokens=0"), ConfigError, "budget_tokens=0; allowed: 1"),
        (("prompt=a", "evict.budget_tokens=0"), ConfigError, "budget of 0 and nothing that evicts"),
        (("prompt=a", "evict.adaptive=heads"), ConfigError, "adaptive=heads and nothing that takes it"),
        (("prompt=a", "evict.adaptive=0"), ConfigError, "adaptive=0; allowed: false, heads, layers"),
        (("prompt=a", "evict.adaptive=true"), ConfigError, "adaptive=true; allowed: false, heads, layers"),
        (
            ("prompt=a", "evict=snapkv", "+evict.adaptive=heads"),
            ConfigError,
            "'snapkv' has no option 'adaptive'",
        ),
        (("prompt=a", "evict=snapkv", "+evict.adaptive=0"), ConfigError, "adaptive=0; allowed: false"),
        (("prompt=a", "evict=snapkv", "+evict.budget=5"), ConfigError, "'snapkv' has no option 'budget'"),
        (
            ("prompt=a", "evict=speckv", "evict.draft=[5]"),
            ConfigError,
            r"^evict.draft=\[5\]; allowed: text or",
        ),
        (
            ("prompt=a", "evict=adakv", "+evict.options.window=abc"),
            ConfigError,
            "^evict.options.window=abc; allowed: a whole number, 0 or more$",
        ),
        (
            ("prompt=a", "evict=snapkv", "evict.budget_tokens=few"),
            ConfigError,
            "few; allowed: a whole number",
        ),
        (("prompt=a", "evict=snapkv", "evict.budget_ratio=0.5"), ConfigError, "give one"),
        (("prompt=a", "evict=snapkv", "evict.kernel=4"), ConfigError, "evict.kernel=4; allowed"),
        (("prompt=a", "evict=snapkv", "evict.window=x"), ConfigError, "evict.window=x; allowed: a whole"),
        (
            ("prompt=a", "method=sparse", "evict.budget_tokens=99", "evict.window=8", "select.window=9"),
            ConfigError,
            "^evict.window=8 and what runs selects entries; pass select.window=8$",
        ),
        (
            ("prompt=a", "evict=snapkv", "+evict.sink=1"),
            ConfigError,
            "no option 'sink'; known: window, kernel",
        ),
        (
            ("prompt=a", "evict.policy=snap"),
            ConfigError,
            "unknown eviction policy 'snap'; known: streaming_llm",
        ),
        (("prompt=a", "decode.max_new_tokens=9999"), ConfigError, "exceed"),
        (("prompt=a", "decode.temperature=hot"), ConfigError, "decode.temperature=hot; allowed: a number"),
        (("prompt=a", "decode.top_k=1.5"), ConfigError, "decode.top_k=1.5; allowed: a whole number"),
        (
            ("prompt=a", "decode.max_new_tokens=all"),
            ConfigError,
            "decode.max_new_tokens=all; allowed: a token count such as 512, 4k",
        ),
        (("prompt=a", "target.path=/no/where"), ConfigError, "/no/where does not exist"),
    ],
)
def test_bad_input_is_one_clear_error(composed, overrides, error, message):
    with pytest.raises(error, match=message):
        generate.run(composed("generate", *overrides))


@pytest.mark.parametrize("shape", ["[1,x]", "[1,1.5]", "[1,0]", "4", "wide"])
def test_a_shape_is_a_list_of_widths(composed, artifact, shape):
    with pytest.raises(ConfigError, match=r"decode.shape=.*; allowed: auto or a list"):
        generate.run(composed("generate", "prompt=a", "artifact=draft", f"decode.shape={shape}"))


def test_a_method_without_training_needs_no_artifact(composed, capsys, chat_target):
    """QuantSpec: the text of plain decoding on its cache, and the draft's figures."""
    call = [
        *NEW,
        f"target.path={chat_target}",
        "prompt='" + "The quick brown fox jumps over the lazy dog. " * 30 + "'",
    ]
    found = []
    cache_alone = ["method.draft=false", "method.kv_bits=8", "method.weight_bits=16"]  # of a draft: unused
    for more in ([], ["method.weight_bits=16"], cache_alone):
        generate.run(composed("generate", *call, "method=quantspec", "decode.lookup=off", *more))
        found.append(said(capsys))
    (text, both), (same, kv_only), (plain, alone) = found
    assert text == same == plain
    assert "accepted" in both and "draft 0.4" in both
    assert "accepted" in kv_only and "draft" not in kv_only.partition("drafted")[2]
    assert "accepted" not in alone
    with pytest.raises(ConflictError, match=r"quantspec\+evict=snapkv"):
        generate.run(composed("generate", *call, "method=quantspec", "evict=snapkv"))
    with pytest.raises(ConfigError, match="longtrain generate method=quantspec"):
        train.run(composed("train", "method=quantspec"))
