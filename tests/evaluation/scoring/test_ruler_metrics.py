"""RULER's string matches against a transcription of the published definitions."""

import random

from longtrain.evaluation.scoring.ruler import clean, match_all, match_part, percent
from tests.evaluation.scoring.official_ruler import official_all, official_part, official_post


def test_equal_to_the_official_definitions() -> None:
    rng = random.Random(0)
    pieces = (
        "12",
        "1",
        "Ab",
        "aB",
        "İ",
        "i̇",
        "ß",
        "SS",
        " ",
        "\n",
        "\x00",
        "\x1f",
        "\x7f",
        ",",
        "\u00a0",
        "\x85",
        "",
    )
    rows = 0
    for count in (1, 2, 3, 7, 50, 500):
        for _ in range(1 if count > 7 else 200):
            raw = ["".join(rng.choices(pieces, k=rng.randrange(9))) for _ in range(count)]
            refs = [
                ["".join(rng.choices(pieces, k=rng.randrange(3))) for _ in range(rng.randrange(1, 6))]
                for _ in range(count)
            ]
            assert [clean(text) for text in raw] == [official_post(text) for text in raw]
            preds = [official_post(text) for text in raw]
            every = [match_all(clean(text), ref) for text, ref in zip(raw, refs, strict=True)]
            some = [match_part(clean(text), ref) for text, ref in zip(raw, refs, strict=True)]
            assert percent(every) == official_all(preds, refs) and percent(some) == official_part(preds, refs)
            rows += count
    assert rows > 2000


def test_equal_on_odd_and_long_texts(text_pairs) -> None:
    rng, found = random.Random(1), set()
    for prediction, answer in text_pairs(3000, longest=400):
        refs = [answer, *rng.sample(["7", "٣", "...", "", "THE", "İ", "x" * 900], 2)]
        assert clean(prediction) == official_post(prediction)
        text = official_post(prediction)
        every, some = match_all(clean(prediction), refs), match_part(clean(prediction), refs)
        assert percent([every]) == official_all([text], [refs]), (prediction, refs)
        assert percent([some]) == official_part([text], [refs]), (prediction, refs)
        found |= {every, some}
    assert {0.0, 1 / 3, 2 / 3, 1.0} == found


def test_by_hand() -> None:
    assert clean(" \x00a\x01b\t\n") == "a\nb" and clean("\x00") == ""
    assert match_all("It is ABC and 12.", ["abc", "12", "13", ""]) == 0.75
    assert match_part("It is ABC", ["x", "abc"]) == 1.0 and match_part("", ["x"]) == 0.0
    assert percent([1.0, 0.0, 0.0]) == 33.33
