"""Places: each text is that of a call for it alone, whenever it begins and whatever is beside it."""

import bisect
import itertools

import pytest
import torch

from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.sampling import HashRng, Sampling
from longtrain.errors import ArtifactError
from longtrain.jobs.answering.places import PREFILL_ENTRIES, PREFILL_TOKENS, Places, Unread
from longtrain.targets.loading import load_target, random_target
from longtrain.targets.shapes import SHAPES

SAMPLED = Sampling(temperature=0.8, seed=3)
MOST = 12
SHAPE = {**SHAPES["llama_micro"], "vocab_size": 400}


@pytest.fixture(scope="module")
def target():
    return random_target(SHAPE, seed=1)


def prompts(lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(10, 400, (n,), generator=draw).tolist() for n in lengths]


def alone(target, ids, one, sampling, most=MOST):
    made = Engine(target).generate(
        [ids], max_new_tokens=most, sampling=sampling, shape=PLAIN, sequence_ids=[one], ignore_eos=True
    )
    return made.tokens[0]


def written(places, sequences, *, together=1, most=lambda one: MOST):
    """Write an answer to each of [(id, prompt)] in whatever place is free; returns them by id."""
    waiting, texts, owner = list(sequences), {one: [] for one, _ in sequences}, {}
    while waiting or owner:
        free = [place for place in range(places.n) if place not in owner][:together]
        if waiting and len(free) >= min(together, len(waiting)):
            begun, waiting = waiting[: len(free)], waiting[len(free) :]
            free, ids = free[: len(begun)], [one for one, _ in begun]
            places.begin(free, [prompt for _, prompt in begun], ids, most=MOST)
            owner.update(zip(free, ids, strict=True))
        for place, token in places.step():
            texts[owner[place]].append(token)
            if len(texts[owner[place]]) == most(owner[place]):
                places.stop(place)
                del owner[place]
    return texts


@pytest.mark.parametrize(
    ("sampling", "n", "together"),
    [
        (Sampling(), 1, 1),
        (SAMPLED, 3, 2),
        pytest.param(SAMPLED, 1, 1, marks=pytest.mark.slow),
        pytest.param(Sampling(), 3, 2, marks=pytest.mark.slow),
        pytest.param(Sampling(), 20, 5, marks=pytest.mark.slow),
        pytest.param(SAMPLED, 20, 5, marks=pytest.mark.slow),
    ],
)
def test_refilled_places_write_what_each_prompt_alone_gets(target, sampling, n, together):
    given = prompts([5, 40, 1, 17, 2, 33, 9, 64, 3])
    length = lambda one: 3 + one % 10  # noqa: E731 - so that places are refilled at different times
    texts = written(Places(target, n, 80, sampling), list(enumerate(given)), together=together, most=length)
    for one, prompt in enumerate(given):
        assert texts[one] == alone(target, prompt, one, sampling)[: length(one)]


def test_a_target_with_windows_writes_what_each_prompt_alone_gets():
    near = random_target({**SHAPES["gemma3_micro"], "query_pre_attn_scalar": 16}, seed=1, dtype="float64")
    given = [[token % 90 + 2 for token in prompt] for prompt in prompts([40, 3, 25])]
    texts = written(Places(near, 2, 60, Sampling()), list(enumerate(given)))
    for one, prompt in enumerate(given):
        assert texts[one] == alone(near, prompt, one, Sampling())


def test_only_what_is_new_is_read(target):
    given = prompts([30, 7, 21])
    places = Places(target, 2, 60, Sampling())
    written(places, list(enumerate(given)))
    assert (places.prefilled, places.prefills) == (29 + 6 + 20, 3) and places.prefill_s > 0


@pytest.mark.parametrize(
    ("kept", "waits"),
    [
        *((0, 5), (1, 0), (9, 1), (35, 0), (35, 5)),
        *(
            pytest.param(kept, waits, marks=pytest.mark.slow)
            for kept, waits in ((0, 0), (0, 1), (1, 1), (1, 5), (9, 0), (9, 5), (35, 1))
        ),
    ],
)
def test_a_text_that_goes_on_is_that_of_a_fresh_prompt(target, kept, waits):
    """Of 30 tokens and 6 of an answer `kept` stay in the place, which waited for what follows them."""
    sampling = Sampling(temperature=0.7, seed=1)
    (first, more, other) = prompts([30, 8, 12])
    places = Places(target, 3, 80, sampling)
    places.begin([1, 2], [first, other], [5, 6], most=MOST)
    answer, beside = [], []
    while len(answer) < 6:
        for place, token in places.step():
            (answer if place == 1 else beside).append(token)
    held = [*first, *answer[:-1]]
    places.stop(1, kept=len(held))
    for _ in range(waits):
        beside += [token for _, token in places.step()]
    whole = [*held[:kept], *more]
    places.begin([1], [whole], [7], most=MOST, cached=[kept])
    again = []
    while len(again) < MOST:
        for place, token in places.step():
            (again if place == 1 else beside).append(token)
            if len(beside) == MOST:
                places.stop(2)
    assert again == alone(target, whole, 7, sampling)
    assert beside[:MOST] == alone(target, other, 6, sampling)
    assert places.prefilled == 29 + 11 + 7


QUESTIONS = [1, 2, 30, 1, 17, 200, 2, 45]


@pytest.mark.parametrize(
    ("sampling", "dtype", "device"),
    [
        (Sampling(), torch.float32, "cpu"),
        (Sampling(temperature=0.8, seed=3), torch.float64, "cpu"),
        pytest.param(Sampling(), torch.float32, "cuda", marks=pytest.mark.gpu),
    ],
    ids=["greedy", "sampled", "cuda"],
)
def test_questions_that_are_read_together_get_the_answers_of_fresh_prompts(
    sampling, dtype, device, monkeypatch
):
    """Places with texts of other lengths, whose answers ended at other steps, and others that decode on."""
    target, reads = random_target(SHAPE, seed=1, device=device, dtype=dtype), []
    real = target.forward

    def forward(rows, *args, outputs, **options):
        if outputs.logits != "all":
            reads.append(tuple(rows.pos_BT.shape))
        return real(rows, *args, outputs=outputs, **options)

    monkeypatch.setattr(target, "forward", forward)
    count = len(QUESTIONS)
    given = prompts([5, 40, 1, 64, 2, 33, 90, 17, 20, 3])
    places = Places(target, count + 2, 300, sampling)
    places.begin(range(count + 2), given, range(count + 2), most=2 * MOST)
    texts, lengths = [[] for _ in given], [3, 1, 7, 4, 9, 2, 5, 8, 2 * MOST, 2 * MOST]
    while any(len(texts[place]) < lengths[place] for place in range(count)):
        for place, token in places.step():
            texts[place].append(token)
            if len(texts[place]) == lengths[place]:
                places.stop(place, kept=len(given[place]) + lengths[place] - 1)
    held = [[*given[place], *texts[place][:-1]] for place in range(count)]
    whole = [[*held[place], *prompts([n], seed=9)[0]] for place, n in enumerate(QUESTIONS)]
    reads.clear()
    places.begin(range(count), whole, range(20, 20 + count), most=MOST, cached=[*map(len, held)])
    # a question of one token goes through the next step; the longest would double what the others read
    assert reads == [(1, 199), (5, 44)]
    again = [[] for _ in range(count)]
    while any(len(one) < MOST for one in again) or any(len(one) < 2 * MOST for one in texts[count:]):
        for place, token in places.step():
            text = again[place] if place < count else texts[place]
            text.append(token)
            if len(text) == (MOST if place < count else 2 * MOST):
                places.stop(place)
    for place in range(count):
        assert again[place] == alone(target, whole[place], 20 + place, sampling)
    for place in (count, count + 1):
        assert texts[place] == alone(target, given[place], place, sampling, 2 * MOST)


def test_a_long_and_a_new_text_of_which_padding_would_leave_a_place_are_read_apart(target):
    first, more, other = prompts([50, 6, 50])
    places = Places(target, 2, 80, Sampling())
    places.begin([0], [first], [0], most=MOST)
    places.stop(0, kept=49)
    whole = [*first[:49], *more]
    places.begin([0, 1], [whole, other], [1, 2], most=MOST, cached=[49, 0])
    texts = [[], []]
    while any(len(text) < MOST for text in texts):
        for place, token in places.step():
            texts[place].append(token)
    assert places.prefills == 3
    assert [text[:MOST] for text in texts] == [
        alone(target, whole, 1, Sampling()),
        alone(target, other, 2, Sampling()),
    ]


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [
        ([], []),
        ([(0, 1)], [1]),
        ([(0, PREFILL_TOKENS + 1)], [1]),  # however long
        ([(PREFILL_ENTRIES, 8)], [1]),
        ([(0, PREFILL_TOKENS // 4)] * 6, [4, 2]),
        ([(PREFILL_ENTRIES // 4 - 8, 8)] * 6, [4, 2]),  # few new tokens after many
        ([(0, 500), (0, 218)], [2]),
        ([(0, 500), (0, 217)], [1, 1]),  # it would be padding for the most part
    ],
)
def test_texts_are_read_together_up_to_a_number_of_tokens_and_entries(target, texts, sizes):
    places = Places(target, 1, 32, Sampling())
    places.slots = 1 << 20
    unread = [Unread(0, cached, range(cached + new)) for cached, new in texts]
    assert [len(group) for group in places._groups(unread)] == sizes


def test_a_text_may_fill_its_place_to_the_last_slot(target):
    (prompt,) = prompts([20])
    places = Places(target, 2, 20 + MOST, Sampling())
    places.begin([0], [prompt], [0], most=MOST)
    tokens = [token for _, token in itertools.chain.from_iterable(places.step() for _ in range(MOST + 6))]
    assert tokens[:MOST] == alone(target, prompt, 0, Sampling())


def test_a_damaged_target_is_refused(target):
    broken = random_target(SHAPE)
    broken.model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ArtifactError, match="NaN or infinite"):
        Places(broken, 1, 40, Sampling()).begin([0], prompts([9]), [0], most=4)


ROUNDING = 1e-5
"""Most that another order of sums moves the cumulated distribution of a target in fp32."""


@pytest.fixture
def drawn(monkeypatch):
    """Of each draw of one sequence: its uniform number, and the cumulated distribution."""
    draws, real = [], HashRng.draw

    def draw(rng, weight_BV, pos_B, role):
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return real(rng, weight_BV, pos_B, role)  # nothing can be read while a graph is recorded
        sums_V = weight_BV[0].double().cumsum(-1)
        draws.append((float(rng.uniform(pos_B, role)[0]), (sums_V / sums_V[-1]).tolist()))
        return real(rng, weight_BV, pos_B, role)

    monkeypatch.setattr(HashRng, "draw", draw)
    return draws


def same_but_for_rounding(text, exact, draws):
    """A first token that differs is one that the same uniform number could draw, up to rounding."""
    assert len(text) == len(exact)
    at = next((i for i, pair in enumerate(zip(text, exact, strict=True)) if pair[0] != pair[1]), None)
    if at is not None:
        assert draws, f"greedy texts differ at {at}"
        uniform, until_V = draws[at]
        low = until_V[text[at] - 1] if text[at] else 0.0
        assert low - ROUNDING <= uniform <= until_V[text[at]] + ROUNDING, f"token {at}: {text[at]}"


def test_rounding_excuses_a_neighbour_only(drawn):
    """In fp64, which is alike on all machines, draw 10 of this text is 1e-8 from boundaries."""
    wide, prompt = load_target("tiny", dtype=torch.float64), prompts([5, 40, 1, 17, 2, 33, 9, 64, 3])[7]
    exact = alone(wide, prompt, 7, Sampling(temperature=0.8, seed=3))
    uniform, until_V = drawn[10]
    others = {bisect.bisect(until_V, uniform + off) for off in (-1e-7, 1e-7)} - {exact[10]}
    assert others
    for other in others:
        same_but_for_rounding([*exact[:10], other, *exact[11:]], exact, drawn)
    for at, wrong in ((3, exact[4]), (10, exact[9])):
        with pytest.raises(AssertionError, match=f"token {at}: {wrong}"):
            same_but_for_rounding([*exact[:at], wrong, *exact[at + 1 :]], exact, drawn)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"]
)
def test_graphs_of_places_write_what_each_prompt_alone_gets(sampling, drawn):
    """In fp32: rounding in another order moves logits by 1e-6, and short texts stay but for a close draw."""
    target = load_target("tiny", device="cuda", dtype=torch.float32)
    given = prompts([5, 40, 1, 17, 2, 33, 9, 64, 3] * 8)
    texts = written(Places(target, 64, 80, sampling), list(enumerate(given)), together=4)
    for one, prompt in enumerate(given):
        drawn.clear()
        same_but_for_rounding(texts[one], alone(target, prompt, one, sampling), drawn)
