"""A tokenizer of bytes with a chat template."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longtrain.targets.tokenizer import CHAT_BY_DEFAULT

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<bot>{% endif %}"


def byte_tokenizer(**settings):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=CHAT, **{CHAT_BY_DEFAULT: False, **settings}
    )


def said(capsys):
    """What `generate` printed: the text, and the line of statistics, which goes to stderr."""
    out, err = capsys.readouterr()
    return out.removesuffix("\n"), err.rstrip("\n").rpartition("\n")[2]
