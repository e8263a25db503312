"""Answers to contest problems, in boxes and out of them, in generated solutions whose answer is known."""

from __future__ import annotations

import random

import pytest

from longtrain.evaluation.metrics.aime import answer_of, right

WORDS = (
    "so",
    "we get",
    "$x^2=$",
    "and",
    "\\frac{3}{4}",
    "\n",
    "(a+b)",
    "٣",
    "７",
    "½",
    ".",
    "...",
    "{",
    "}",
    "$",
)
WRITTEN = (
    "{}",
    "${}$",
    "\\textbf{{{}}}",
    "\\text{{ {} }}",
    " {}.",
    "m+n={}",
    "({})",
    "0{}",
    "\\mathbf{{(A)}} {}",
)
WRONG = ("1000", "-7", "3.5", "\\frac{7}{8}", "x", "", "12345", "1,234", "\\dfrac12", "7/8", "none")


def solution(rng: random.Random) -> str:
    return " ".join(rng.choice((*WORDS, str(rng.randrange(2000)))) for _ in range(rng.randrange(12)))


def test_the_last_box_counts() -> None:
    rng, seen = random.Random(0), set()
    for _ in range(3000):
        answer = rng.randrange(1000)
        first = f"\\boxed{{{rng.randrange(1000)}}} " * rng.randrange(2)
        box = rng.choice(("\\boxed{%s}", "\\boxed {%s}", "$\\boxed{%s}$", "\\boxed{{%s}}"))
        good = rng.random() < 0.7
        inside = rng.choice(WRITTEN).format(answer) if good else rng.choice(WRONG)
        text = solution(rng) + first + box % inside + " " + solution(rng).replace("{", "").replace("}", "")
        assert answer_of(text) == (answer if good else None), text
        seen.add(good)
    assert seen == {True, False}


def test_without_a_box_the_last_number_counts() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        answer = rng.randrange(1000)
        end = rng.choice((".", "", "!", "\n", "$", "**", " degrees", ",", "$.", "</p>"))
        text = f"{solution(rng)} the answer is {answer}{end}"
        assert answer_of(text) == answer and right(text, answer) == 1.0 and right(text, answer + 1) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", None),
        ("no number", None),
        ("...", None),
        ("\\boxed{025}", 25),
        ("\\boxed{204.0}", 204),
        ("\\boxed{204", 204),  # cut off at the last token
        ("\\boxed 33", 33),
        ("\\boxed{}", None),
        ("\\boxed{113} and then 5", 113),
        ("\\boxed{1} no, \\boxed{2}", 2),
        ("\\boxed{1,000}", None),
        ("\\boxed{1{,}000}", None),
        ("\\boxed{999}", 999),
        ("\\boxed{1000}", None),
        ("\\boxed{٣}", None),  # a decimal digit, but not of the answer sheet
        ("a+b+c = 1, 2, 3", 3),
        ("1,2,3", 3),
        ("it is 204.", 204),
        ("it is 2.04", None),
        ("it is -204", None),
        ("it is 3/204", None),
        ("<think>\\boxed{1}</think> 7", 7),
        ("<think>\\boxed{1}</think> nothing", None),
        ("<think> \\boxed{8}", None),  # cut off while it thinks
        ("<think> maybe \\boxed{204}? wait, that", None),
        ("<think>\\boxed{1}</think> 7 <think> 8", None),
        ("9" * 400, None),
        ("\\boxed{" + "9" * 5000 + "}", None),
        # nothing is worked out
        ("\\boxed{3\\cdot 68}", None),
        ("\\boxed{104\\sqrt{2}}", None),
        ("\\boxed{204\\pi}", None),
        ("\\boxed{\\frac{408}{2}}", None),
        ("\\boxed{113+91}", None),
        ("\\boxed{2^{10}}", None),
        ("\\boxed{204x}", None),
        ("\\boxed{204!}", 204),  # an exclamation, since 204! is no answer to anything
        ("\\boxed{204\\mathrm{i}}", None),
        ("\\boxed{1, 204}", None),
        ("\\boxed{(1,2)}", None),
        ("\\boxed{.204}", None),
        ("\\boxed{n \\le 204}", None),
        ("\\boxed{n <= 204}", None),
        ("\\boxed{204\\%}", None),
        ("3 and then \\boxed{p+q}", None),
        # but what is written out counts
        ("\\boxed{m+n = 113 + 91 = 204}", 204),
        ("\\boxed{204^\\circ}", 204),
        ("\\boxed{204^{\\circ}}", 204),
        ("\\boxed{204 \\text{ cm}^2}", 204),
        ("\\boxed{204\\text{ degrees}}", 204),
        ("\\boxed{\\text{The answer is } 204}", 204),
        ("\\boxed{\\left(204\\right)}", 204),
        ("\\boxed{$204$}", 204),
        ("\\boxed{\\,204.\\,}", 204),
        ("\\boxed{0}", 0),
        ("\\boxed{000}", 0),
        ("\\boxed{073}", 73),
        # without a box, what follows "answer is"
        ("The answer is 204 (see step 3).", 204),
        ("The final answer is: **204**. Step 3 shows it.", 204),
        ("Answer: 073 as 3 of them fit", 73),
        ("**Answer:** $204$ by step 3", 204),
        ("the answer is \\(m+n = 113+91 = 204\\), see 3", 204),
        ("the answer is 113 + 91 = 204. QED in 3 steps", 204),
        ("The answer to problem B is 204, of 3 parts", 204),
        ("the answer is equal to 204", 204),
        ("The answer is 3 \\cdot 68", None),
        ("The answer is 3*68", None),
        ("The answer is $104\\sqrt{2}$", None),
        ("The answer is 204 pi", None),
        ("The answer is 204x", None),
        ("The answer is -204", None),
        ("The answer is 20.4", None),
        ("The answer is 1,204", None),
        ("The answer is 7/204", None),
        ("The answer is 5? No: the answer is 7.", 7),
        ("The answer is therefore 204", 204),
        # without either, the last number, if it stands alone
        ("**204**", 204),
        ("Thus m+n = 113 + 91 = 204", 204),
        ("Thus it is 3\\cdot 68", None),
        ("Thus it is 113+91", None),
        ("Thus it is 113 - 91", None),
        ("Thus it is 2^{10}", None),
        ("Thus it is 104\\sqrt{2}", None),
        ("Thus it is 204x", None),
        ("Thus it is 204/3", None),
    ],
)
def test_by_hand(text: str, answer: int | None) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("maybe \\boxed{204}? wait, that", None),
        ("", None),
        ("maybe \\boxed{204}? no.</think> It is \\boxed{33}.", 33),
        ("204</think>", None),
    ],
)
def test_thoughts_that_the_prompt_opens(text: str, answer: int | None) -> None:
    assert answer_of(text, opened=True) == answer
    assert right(text, 204, opened=True) == 0.0
