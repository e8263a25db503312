"""What the command line prints of an error."""

import torch

from longtrain.cache.room import NoRoomError
from longtrain.errors import ConfigError
from longtrain.prompt.explain import explain


def test_running_out_of_memory_says_what_to_do():
    long = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB ..."
    said = explain(torch.OutOfMemoryError(long))
    assert said.startswith("CUDA out of memory. Tried to allocate 2.00 GiB; shorten the rows")
    assert "capacity" not in said and "\n" not in said


def test_our_own_errors_are_printed_as_they_are():
    for error in (ConfigError("x=1; allowed: 2"), NoRoomError("a cache takes 3 GiB")):
        assert explain(error) == str(error)


def test_others_keep_their_type():
    assert (
        explain(ValueError("first\n  second")) == "ValueError: first second (HYDRA_FULL_ERROR=1 shows where)"
    )
