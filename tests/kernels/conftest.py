"""Makes Triton's interpreter faster, where TRITON_INTERPRET chooses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _language_patched_once() -> Iterator[None]:
    """Replace the functions of `triton.language` once for each module that has kernels.

    The interpreter does so in each call of a kernel, and of a function in it: a third of the time. In its
    process nothing is compiled, so nothing has to be put back.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    patch_lang, done = interpreter._patch_lang, set()

    class Nothing:
        def restore(self) -> None: ...

    def once(fn: FunctionType) -> Any:
        if id(fn.__globals__) not in done:
            patch_lang(fn)
            done.add(id(fn.__globals__))
        return Nothing()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        yield
