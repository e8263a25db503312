"""A micro target that reads bytes: prompts have as many tokens as bytes, its weights are random."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}[assistant]{% endif %}"


def byte_tokenizer(*, begin=False):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<s>"])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if begin:
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", chat_template=CHAT)


def byte_target(*, begin=False, dtype=torch.float32, **shape):
    made = random_target({**SHAPES["llama_micro"], "vocab_size": 257, **shape}, dtype=dtype)
    made.tokenizer = byte_tokenizer(begin=begin)
    return made
