"""Where blocks begin and end in packed conversations whose answers begin with a thinking block."""

from __future__ import annotations

import pytest
import torch

from longtrain.data.chat.mask import render
from longtrain.methods.dspark.anchors import anchors_of
from tests.data.conftest import tokenizer, tokenizer_folder  # noqa: F401 (fixtures)

THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>"
    "{% if loop.last %}OPEN{{ m['reasoning'] }}</think>CLOSE{% endif %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
)
"""As published templates: the thinking of earlier answers is left out of the text."""
TEMPLATES = {
    "written": THINKING.replace("OPEN", "{% generation %}<think>").replace("CLOSE", "{% endgeneration %}"),
    "begun by the prompt": THINKING.replace("OPEN", "<think>{% generation %}").replace(
        "CLOSE", "{% endgeneration %}"
    ),
    "not learned": THINKING.replace("OPEN", "<think>").replace("CLOSE", ""),
}
LEARNED = {
    "written": "<think>Hm.</think>May.<|end|>",
    "begun by the prompt": "Hm.</think>May.<|end|>",
    "not learned": "May.<|end|>",
}
CHAT = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "She.", "reasoning": "Left out."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "May.", "reasoning": "Hm."},
]


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("slots", [3, 40])
def test_blocks_keep_to_what_the_target_writes(tokenizer, kind, slots):  # noqa: F811
    """Two packed conversations, the second one cut right after a label.

    A block runs through the end of thinking if thinking is learned, and never into a header, a prompt or the
    next conversation. Its slots are the tokens of one answer, in order, up to the end marker.
    """
    tokenizer.chat_template = TEMPLATES[kind]
    one = render(tokenizer, CHAT, how="template", name="x")
    ids, mask = torch.from_numpy(one.ids_T), torch.from_numpy(one.mask_T)
    length, cut = len(ids), len(ids) - 3
    assert bool(mask[cut - 1])
    found = anchors_of(torch.cat((mask, mask[:cut])), (0, length, length + cut), slots=slots, every=1, seed=0)
    ids_T = torch.cat((ids, ids[:cut])).tolist()
    texts = [
        [tokenizer.convert_ids_to_tokens(token) for token in ids_T[place : place + 1 + int(valid.sum())]]
        for place, valid in zip(found.place_A.tolist(), found.valid_AK, strict=True)
    ]

    def blocks(answer: str, less: int = 0) -> list[list[str]]:
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(answer, add_special_tokens=False).input_ids)
        tokens = tokens[: len(tokens) - less]
        return [tokens[at : at + 1 + slots] for at in range(len(tokens) - 1)]

    whole = [*blocks("She.<|end|>"), *blocks(LEARNED[kind])]
    assert texts == [*whole, *blocks("She.<|end|>"), *blocks(LEARNED[kind], less=3)]
    assert found.start_A.tolist() == [0] * len(whole) + [length] * (len(texts) - len(whole))
    starts = ["".join(text)[0] for text in texts]
    assert ("<" in starts) == (kind != "not learned")  # of the thinking block's own tokens
