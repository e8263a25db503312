"""Hyperparameters of the reference target: its shape, its tokenizer and the weights of its labels."""

from __future__ import annotations

from dataclasses import dataclass

TRAINS_TARGET = True
"""This method trains and exports a target instead of a module for one."""


@dataclass
class Config:
    """A small Llama trained from scratch. There is no paper: the values are those of the bundled target."""

    vocab_size: int = 4096  # entries of the tokenizer, special tokens and bytes included
    hidden_size: int = 384  # width of the residual stream
    n_layers: int = 6  # decoder layers
    n_heads: int = 8  # query heads; n_heads * head_dim may differ from hidden_size
    n_kv_heads: int = 2  # KV heads (grouped-query attention)
    head_dim: int = 64  # size of a head
    intermediate_size: int = 704  # width of the MLP
    rope_base: float = 500000.0  # rotary base
    max_positions: int = 16384  # context, tokens
    text_weight: float = 1.0  # loss weight of running text
    answer_weight: float = 1.5  # loss weight of the assistant's tokens
    value_weight: float = 5.0  # loss weight of answer tokens that can only be known from the context
    tokenizer: str = ""  # folder of the tokenizer; empty: the one that `prepare` trained beside the data
    init_seed: int = 0  # seed of the initial weights
    compile: bool = False  # torch.compile the decoder layers: faster steps after a minute of compiling
