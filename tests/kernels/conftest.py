"""Makes Triton's interpreter faster, where TRITON_INTERPRET chooses it."""

from __future__ import annotations

import dataclasses
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


@pytest.fixture(scope="session", autouse=True)
def _integers_computed_once() -> Iterator[None]:
    """Leave out the second computation of each sum and product of integers, in int64.

    The interpreter compares both and then asserts, but only in `debug`, which is off: nobody looks at it.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    assert not options.debug
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=False))
        yield


@pytest.fixture(scope="session", autouse=True)
def _types_made_once() -> Iterator[None]:
    """Keep NumPy's type of each Triton type, and the block types that differ in their elements alone.

    The interpreter makes them anew in each operation; none of them is ever changed.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.language.core import block_type
    from triton.runtime import interpreter

    numpy_type, with_element = interpreter._get_np_dtype, block_type.with_element_ty
    numpy_types: dict[str, Any] = {}
    blocks: dict[tuple[str, str], Any] = {}

    def numpy_type_of(kind: Any) -> Any:
        found = numpy_types.get(kind.name)
        if found is None:
            found = numpy_types[kind.name] = numpy_type(kind)
        return found

    def with_element_of(self: Any, element: Any) -> Any:
        key = self.name, element.name
        if key not in blocks:
            blocks[key] = with_element(self, element)
        return blocks[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", numpy_type_of)
        patch.setattr(block_type, "with_element_ty", with_element_of)
        yield
