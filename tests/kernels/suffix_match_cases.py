"""Texts in ring buffers for the tests of the longest match."""

import torch
from torch import Tensor

from longtrain.kernels.suffix_match import NONE


def texts_of(slots: int) -> tuple[Tensor, Tensor]:
    """Short texts, loops, random ones of few tokens, longer ones than the buffer; last positions."""
    gen = torch.Generator().manual_seed(0)
    texts = [[5], [5, 5], list(range(20)), [1, 2, 3] * (slots // 3), [7] * (slots - 1)]
    texts += [torch.randint(vocab, (n,), generator=gen).tolist() for vocab in (2, 4) for n in (9, slots)]
    texts += [torch.randint(3, (3 * slots - 5,), generator=gen).tolist(), [1, 2, 3, 4] * slots]
    texts.append(([1, 2, 3] * slots)[: slots + 2])  # what follows its match goes round the end of the ring
    tokens_BC = torch.full((len(texts), slots), NONE, dtype=torch.int32)
    for row, text in enumerate(texts):
        for position, token in enumerate(text):
            tokens_BC[row, position % slots] = token
    return tokens_BC, torch.tensor([len(text) - 1 for text in texts])
