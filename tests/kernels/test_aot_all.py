"""No kernel goes uncompiled by the tests: each has its check for compute capability 9.0."""

import importlib
import pkgutil
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

import longtrain.kernels

HERE = Path(__file__).parent


def test_every_kernel_is_compiled_by_some_test():
    """Each is named, with its module, in a test that calls `compile_kernel`."""
    texts = [path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py")]
    texts = [text for text in texts if "compile_kernel(" in text]
    found, missing = 0, []
    for module in pkgutil.walk_packages(longtrain.kernels.__path__, "longtrain.kernels."):
        if not module.name.endswith(("kernel", ".backward")):
            continue
        here = importlib.import_module(module.name)
        for name, value in vars(here).items():
            if (
                name.endswith("_kernel")
                and getattr(getattr(value, "fn", None), "__module__", "") == here.__name__
            ):
                found += 1
                operator = module.name.split(".")[2]
                if not any(name in text and operator in text for text in texts):
                    missing.append(f"{module.name}.{name}")
    assert found >= 20 and not missing
