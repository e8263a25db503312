"""Modules that are built for their shapes alone."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from longtrain.layers import shapes_alone


class Drawing(TorchFunctionMode):
    """Notes the names of the functions that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("uniform_", "normal_"):
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("context", "drawn"),
    [(nullcontext, {"uniform_", "normal_"}), (shapes_alone, set())],
    ids=["usual", "shapes"],
)
def test_shapes_alone_draw_no_random_numbers(context, drawn):
    with Drawing() as seen, context():
        made = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    assert seen.names == drawn
    assert {tuple(weight.shape) for weight in made.parameters()} == {(5, 3), (2, 3), (2,)}
    assert all(weight.is_meta is not bool(drawn) for weight in made.parameters())


def test_a_tensor_that_is_put_elsewhere_has_its_values():
    with shapes_alone():
        elsewhere, shape = torch.empty(3, device="cpu"), torch.empty(3)
        assert nn.init.ones_(elsewhere).tolist() == [1, 1, 1]
        assert nn.init.ones_(shape) is shape
