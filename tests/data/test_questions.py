"""One question at the end of a prompt: exact lengths, and answers that the context holds."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from longtrain.assets import asset_dir
from longtrain.data.retrieval.material import ChatIds, TextStream
from longtrain.data.retrieval.synthetic import QUESTION_TASKS, RetrievalWriter, turn_marks
from longtrain.data.retrieval.wording import KEY, PRETRAIN, RULER, wording_of
from longtrain.errors import ConfigError
from longtrain.evaluation.ruler.tasks import TASKS
from longtrain.evaluation.ruler.writers import SINGULAR
from tests.data.latin import TEXT, VOCABULARY, decode, encode

PREFIXES = {
    "ruler": {
        "needles": r" The special magic number(s|) for (\S+) mentioned in the provided text (are|is)",
        "chains": r" Answer: According to the chain\(s\) of variable assignment in the text above, (\d) "
        r"variables are assigned the value (\d{5}), they are:",
        "table": r" The value of (\d{7}) in the table above is",
        "quote": r"(.{12})",
    },
    "pretrain": {
        "needles": r"The special magic number(s|) for (\S+) mentioned in the provided text (are|is)",
        "chains": r"The variables are:",
        "table": r"(\d{7}):",
        "quote": r"",
    },
}
"""What the assistant's turn begins with, by wording and task: the same words whoever answers."""
NEEDLES = r"\nWhat (are all|is) the special magic number(s|) for (\S+) mentioned in the provided text\?"
ASKED = {
    "ruler": {
        "needles": NEEDLES,
        "chains": r"\nQuestion: Find all variables that are assigned the value (\d{5}) in the text above\.",
        "table": r"What is the value of (\d{7}) in the table above\?",
        "quote": r"\nQuote the passage of the text above that begins with:.{12}",
    },
    "pretrain": {
        "needles": NEEDLES,
        "chains": r"\nFind all variables that are assigned the value (\d{5}) in the text above\.",
        "table": r"Look up (\d{7})\.",
        "quote": r"\nQuote the passage that continues after:.{12}",
    },
}


def test_a_target_without_the_key_is_asked_in_rulers_words(tokenizer) -> None:
    assert wording_of(tokenizer) is RULER
    tokenizer.init_kwargs[KEY] = "pretrain"
    assert wording_of(tokenizer) is PRETRAIN
    tokenizer.init_kwargs[KEY] = "mine"
    with pytest.raises(ConfigError, match="retrieval_wording='mine'; allowed: ruler, pretrain, or"):
        wording_of(tokenizer)


def test_one_value_is_asked_for_in_the_singular_as_ruler_does() -> None:
    """The words of RULER's own tasks, which are kept apart in bundled/benchmarks/ruler.json."""
    spec = TASKS["niah_single_2"]
    for single in (True, False):
        template, prefix, what = spec.template, spec.answer_prefix, "numbers"
        if single:
            what = "number"
            for old, new in SINGULAR:
                template, prefix = template.replace(old, new), prefix.replace(old, new)
        words = RULER.needle if single else RULER.needles
        context = "CONTEXT"
        asked = template.format(type_needle_v=what, context=context, query="grey-owl")
        assert words.intro + context + words.ask.format(key=" grey-owl") == asked
        assert words.answer.format(key=" grey-owl") == prefix.format(type_needle_v=what, query="grey-owl")
    chains = TASKS["vt"]
    intro, ask = chains.template.split("{context}")
    assert RULER.chains.intro.endswith(intro) and RULER.chains.ask == ask.replace("query", "value")
    said = chains.answer_prefix.replace("num_v", "count").replace("query", "value")
    assert RULER.chains.answer == said.rstrip()


def test_needles_whose_other_values_did_not_fit_are_asked_for_in_the_singular() -> None:
    stream = TextStream(np.array(encode(TEXT), dtype=np.uint16), VOCABULARY, "book")
    own = RetrievalWriter(encode, ChatIds((256,), (257,), (258,)), [stream])
    counts = set()
    for seed in range(60):
        made = own.question("needles", 520, np.random.default_rng(seed))
        single = "What is the special magic number for" in decode(made.question_T)
        assert single == (len(made.values) == 1)
        assert ("A special magic number is hidden" in decode(made.context_T)) == single
        counts.add(len(made.values))
    assert {1, 2} <= counts


@pytest.mark.parametrize("task", QUESTION_TASKS)
def test_a_question_stands_at_the_end_of_a_prompt_of_exact_length(writer: RetrievalWriter, task: str) -> None:
    for n in (max(430, writer.least_tokens(task)), 977, 2000, 4096):
        made, again = (writer.question(task, n, np.random.default_rng([n, 5])) for _ in range(2))
        assert len(made.context_T) + len(made.question_T) == n and made.task == task
        assert all(
            np.array_equal(a, b) for a, b in zip(vars(made).values(), vars(again).values(), strict=True)
        )
        context, question = decode(made.context_T), decode(made.question_T)
        assert context.startswith("<user>") and context.count("<user>") == 1
        words = writer.wording.name
        assert re.fullmatch(f"{ASKED[words][task]}<assistant>{PREFIXES[words][task]}", question, re.DOTALL)
        assert "<assistant>" not in context
        assert decode(made.answer_T) == made.answer + "<end>"
        assert made.answer == (made.values[0] if task == "quote" else f" {', '.join(made.values)}.")


def test_what_an_answer_begins_with_fits_the_question(writer: RetrievalWriter) -> None:
    numbers, words = set(), writer.wording.name
    for seed in range(80):
        needles = decode(writer.question("needles", 900, np.random.default_rng(seed)).question_T)
        verb, s, key = re.search(ASKED[words]["needles"], needles).groups()
        said, its, begun = re.search(f"<assistant>{PREFIXES[words]['needles']}$", needles).groups()
        assert (said, its) == (s, key) and (begun, s) in {("are", "s"), ("is", "")} and begun in verb
        numbers.add(begun)
        table = decode(writer.question("table", 900, np.random.default_rng(seed)).question_T)
        asked, begun = re.findall(r"\d{7}", table)
        assert asked == begun
    assert numbers == {"are", "is"}


@pytest.mark.corners
@pytest.mark.parametrize("task", QUESTION_TASKS)
def test_the_shortest_prompts_hold_every_question(writer: RetrievalWriter, task: str) -> None:
    least = writer.least_tokens(task)
    values = set()
    for seed in range(200):
        made = writer.question(task, least, np.random.default_rng(seed))
        assert len(made.context_T) + len(made.question_T) == least
        assert all(value in decode(made.context_T) for value in made.values)
        values.add(len(made.values))
    assert min(values) == {"chains": 2}.get(task, 1)
    with pytest.raises(ConfigError, match=rf"{least - 1} tokens is too short .*'{task}'.* {least} or more"):
        writer.question(task, least - 1, np.random.default_rng(0))


def test_the_shortest_prompts_are_found_where_numbers_are_not_spelt_by_digits() -> None:
    def pairs(text: str) -> list[int]:
        """Two digits a token, the first with a token of its own before it."""
        spaced = re.sub(r"\d+", lambda m: "\x01" + re.sub("..?", lambda p: chr(128 + int(p[0])), m[0]), text)
        return encode(spaced)

    stream = TextStream(np.array(encode(TEXT), dtype=np.uint16), VOCABULARY, "book")
    other = RetrievalWriter(pairs, ChatIds((256,), (257,), (258,)), [stream])
    assert other.digits is None
    for task in QUESTION_TASKS:
        for seed in range(50):
            made = other.question(task, other.least_tokens(task), np.random.default_rng(seed))
            assert len(made.context_T) + len(made.question_T) == other.least_tokens(task)


def test_needle_questions_are_about_what_the_context_says(writer: RetrievalWriter) -> None:
    keys_seen, values_seen = set(), set()
    for seed in range(60):
        made = writer.question("needles", 8000, np.random.default_rng(seed))
        said = re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", decode(made.context_T))
        key, begun = re.findall(r"for (\S+) mentioned", decode(made.question_T))
        assert key == begun
        assert made.values == tuple(value for name, value in said if name == key)
        keys_seen.add(len({name for name, _ in said}))
        values_seen.add(len(made.values))
    assert min(keys_seen) == 1 and max(keys_seen) == 16 and values_seen == {1, 2, 3, 4}


def test_needles_that_do_not_fit_are_left_out(writer: RetrievalWriter) -> None:
    for seed in range(40):
        made = writer.question("needles", 700, np.random.default_rng(seed))
        assert made.values and all(value in decode(made.context_T) for value in made.values)


def test_other_questions_have_their_answer_in_the_context(writer: RetrievalWriter) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        table = writer.question("table", 3000, rng)
        words = writer.wording.name
        key = re.search(ASKED[words]["table"], decode(table.question_T))[1]
        assert f"\n{key}: {table.values[0]}\n" in decode(table.context_T)
        quote = writer.question("quote", 3000, rng)
        asked, begun = decode(quote.question_T).split("<assistant>")
        cue = asked[-12:]
        assert begun == (cue if words == "ruler" else "")
        assert cue + quote.values[0] in decode(quote.context_T)
        chains = writer.question("chains", 3000, rng)
        value = re.search(ASKED[words]["chains"], decode(chains.question_T))[1]
        context = decode(chains.context_T)
        known = re.findall(rf"VAR (\w+) = {value}\.", context)
        for name, of in re.findall(r"VAR (\w+) = VAR (\w+)\.", context):
            known += [name] if of in known else []
        assert tuple(known) == chains.values
        said = re.search(PREFIXES[words]["chains"], decode(chains.question_T)).groups()
        assert said == ((str(len(known)), value) if words == "ruler" else ())


def test_a_question_keeps_what_conversations_begin_with() -> None:
    stream = TextStream(np.array(encode(TEXT), dtype=np.uint16), VOCABULARY, "book")
    writer = RetrievalWriter(encode, ChatIds((256,), (257,), (258,), start=(0,)), [stream])
    for task in QUESTION_TASKS:
        made = writer.question(task, 900, np.random.default_rng(0))
        assert made.context_T[:2].tolist() == [0, 256] and (made.context_T == 0).sum() == 1
        assert len(made.context_T) + len(made.question_T) == 900


def test_questions_that_cannot_be_written_are_refused(writer: RetrievalWriter) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=r"100 tokens is too short .* 4\d\d or more"):
        writer.question("needles", 100, rng)


@pytest.mark.parametrize("recipe", ["recipes/lookaheadkv_local", "conf/data/lookaheadkv_small"])
def test_the_shortest_prompt_of_a_recipe_for_any_target_has_room_for_every_task(recipe):
    """In RULER's words, and with a small vocabulary, whose tokens are short."""
    values = yaml.safe_load((Path(__file__).parents[2] / f"{recipe}.yaml").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(asset_dir("bundled") / "tiny")
    vocabulary = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    streams = [TextStream(np.array(tokenizer(TEXT).input_ids), vocabulary, "book")]
    writer = RetrievalWriter(
        lambda text: tokenizer(text).input_ids, turn_marks(tokenizer), streams, wording=RULER
    )
    shortest = values.get("data", values)["prompt_tokens"][0]
    assert max(map(writer.least_tokens, QUESTION_TASKS)) <= shortest
