"""Wheel and sdist: what is in them, and that they work far from the checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MODULES = """
import importlib, pkgutil, longtrain
not_here = ("longtrain.__main__", "longtrain.integrations.lookaheadkv_kvpress")  # the press needs kvpress
for module in pkgutil.walk_packages(longtrain.__path__, "longtrain."):
    if module.name not in not_here:
        importlib.import_module(module.name)
print(longtrain.__file__)
"""


def call(*words: str | Path, cwd: Path) -> str:
    """Run a program; its output, or a failed test with what it said."""
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, root, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; its dependencies are read from the one the tests run in."""
    folder = tmp_path_factory.mktemp("env") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(
        call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--force-reinstall"]
    call(*pip, built[1], cwd=folder)
    return python


def test_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[1]).namelist()
    assert {name.split("/")[0] for name in names} == {"longtrain", "longtrain-0.1.0.dist-info"}
    for part in (
        "py.typed",
        "_assets/conf/base.yaml",
        "_assets/conf/target/templates/vicuna.jinja",
        "_assets/recipes/quickstart.yaml",
        "_assets/bundled/benchmarks/ruler.json",
        "evaluation/reporting/web/page.html",
    ):
        assert f"longtrain/{part}" in names
    assert any(name.startswith("longtrain/_assets/bundled/tiny/") for name in names)
    assert any(name.startswith("longtrain/_assets/data_prep/") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert built[1].stat().st_size < 16 * 2**20  # the target has at most 10 MiB, the text 2 MiB


def test_sdist_can_be_tested(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for part in ("tests/test_wheel.py", "README.md", "LICENSE", "pyproject.toml", "conf/base.yaml"):
        assert part in names
    assert not any(name.startswith(("runs/", "checkpoints/", "data/")) for name in names)


def test_every_module_imports(python: Path, tmp_path: Path) -> None:
    where = call(python, "-c", MODULES, cwd=tmp_path).strip()
    assert Path(where).is_relative_to(python.parent.parent)


def test_recipes_are_there_from_any_folder(python: Path, root: Path, tmp_path: Path) -> None:
    listed = call(python.parent / "longtrain", "recipes", cwd=tmp_path)
    for file in (root / "recipes").glob("*.yaml"):
        assert f"{file.stem} " in listed
    assert "recipes: longtrain recipes" in call(python.parent / "longtrain", "eval", "--help", cwd=tmp_path)
    shown = call(python, "-m", "longtrain", "train", "+recipe=quickstart", "--cfg", "job", cwd=tmp_path)
    assert "path: tiny" in shown
    assert not list(tmp_path.iterdir())


def test_the_bundled_target_generates(python: Path, tmp_path: Path) -> None:
    words = ("generate", "target=tiny", "prompt=The old man", "decode.max_new_tokens=8")
    assert call(python, "-m", "longtrain", *words, cwd=tmp_path).strip()
