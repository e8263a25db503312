"""The house rules that a machine can check: who imports whom, who may import which package, file length."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "longtrain"

TIERS = [
    {"errors", "log"},
    {"settings", "files", "tables", "progress"},
    {"plots", "assets", "provenance"},
    {"costs"},
    {"kernels", "layers", "losses", "chunked", "data"},
    {"cache"},
    {"targets"},
    {"decoding"},
    {"methods"},
    {"artifact"},
    {"systems"},
    {"training", "evaluation", "bench"},
    {"jobs"},
    {"explain", "suite_help"},
    {"cli"},
    {"__main__"},
]
"""Left (earlier) may not import right (later). A new part needs a place here."""

SAME_TIER = {("layers", "kernels"), ("losses", "kernels")}
"""(importer, imported) pairs of one tier that are allowed; the parts of a tier do not know each other."""

FENCES = {
    "triton": ("kernels",),
    "flash_attn": ("kernels",),
    "liger_kernel": ("losses", "kernels", "targets"),
    "lightning": ("training", "data/rows/module.py"),
    "deepspeed": ("training",),
    "wandb": ("training",),
    "hydra": ("cli", "jobs", "explain"),
    "omegaconf": ("cli", "jobs", "explain"),
    "rich": ("cli", "jobs", "training", "data", "tables", "progress"),
    "matplotlib": ("plots", "evaluation", "training", "bench"),
    "pydantic": ("settings",),
    "plotly": ("evaluation/reporting/page.py",),
    "datasets": ("data",),
    "huggingface_hub": (
        "artifact",
        "targets",
        "data",
        "methods/lookaheadkv/press.py",
    ),
    "openai": ("evaluation/judge/client.py",),
    "lm_eval": ("evaluation/lm_harness.py",),
    "kvpress": ("methods/lookaheadkv/press.py",),
}
"""Third-party package -> the parts of longtrain that may import it."""

TRANSFORMERS = {
    "targets": None,
    "data": {"PreTrainedTokenizerBase", "AutoTokenizer"},
    "decoding": {"PreTrainedTokenizerBase"},
    "evaluation": {"PreTrainedTokenizerBase"},
    "artifact": {"PreTrainedTokenizerBase"},
    "jobs": {"PreTrainedTokenizerBase"},
    "methods": {"PreTrainedTokenizerBase"},
}
"""Part -> the names of transformers it may use; None: any. Modelling stays in `targets`."""

STANDALONE = {"methods/lookaheadkv/press.py"}
"""Files for another library's users, who copy them: they may know its models and nothing of longtrain, and no
file of longtrain imports them."""

FILES = sorted(PACKAGE.rglob("*.py"))
IDS = [str(file.relative_to(PACKAGE)) for file in FILES]


def part_of(file: Path) -> str:
    """The tier table's name of a file: `targets` of targets/model.py, `cli` of cli.py."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> list[tuple[str, str]]:
    """(module, name) of every import in a file, wherever it stands; name is empty for `import module`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the whole name"
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def tier(part: str) -> int:
    """Position of a part in the table."""
    return next(i for i, parts in enumerate(TIERS) if part in parts)


def forbidden(importer: str, imported: str) -> str:
    """Why one part may not import another; empty if it may."""
    if importer == imported or (importer, imported) in SAME_TIER:
        return ""
    if tier(imported) < tier(importer):
        return ""
    side = "beside" if tier(importer) == tier(imported) else "right of"
    return f"{importer} imports {imported}, which stands {side} it"


def test_every_part_has_a_place() -> None:
    parts = {part_of(file) for file in FILES} - {"__init__"}
    assert parts == set().union(*TIERS) & parts
    assert all(sum(part in tier_ for tier_ in TIERS) == 1 for part in parts)


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_imports_point_left(file: Path) -> None:
    importer = part_of(file)
    for module, name in imports(file):
        if module.split(".")[0] != "longtrain":
            continue
        words = module.split(".")[1:] or [name]
        if words in ([""], ["__version__"]):
            continue  # the bare package: its version
        assert importer != "__init__", (
            f"longtrain/__init__.py imports {module}; importing it must cost nothing"
        )
        assert not (why := forbidden(importer, words[0])), f"{why} ({module})"


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_third_party_fences(file: Path) -> None:
    where = str(file.relative_to(PACKAGE))
    for module, name in imports(file):
        package = module.split(".")[0]
        allowed = FENCES.get(package)
        if allowed is not None:
            inside = part_of(file) in allowed or where in allowed
            assert inside, f"{where} imports {package}; only {', '.join(allowed)} may"
        if package == "transformers":
            assert part_of(file) in TRANSFORMERS, f"{where} imports transformers"
            names = None if where in STANDALONE else TRANSFORMERS[part_of(file)]
            assert names is None or name in names, (
                f"{where} imports {module}.{name}: models are built in targets"
            )


def test_standalone_files_stand_alone() -> None:
    names = {f"longtrain.{where.removesuffix('.py').replace('/', '.')}" for where in STANDALONE}
    for file in FILES:
        where = str(file.relative_to(PACKAGE))
        for module, name in imports(file):
            assert {module, f"{module}.{name}"}.isdisjoint(names), f"{where} imports {module}"
            assert where not in STANDALONE or not module.startswith("longtrain"), f"{where} imports {module}"


def test_a_method_never_imports_another() -> None:
    files = list(PACKAGE.glob("methods/*/*.py"))
    assert files
    for file in files:
        own = ("longtrain", "methods", file.parent.name)
        for module, _ in imports(file):
            words = tuple(module.split("."))
            beside = words[:2] == own[:2] and len(words) > 2 and words[2] != "spec"
            assert not beside or words[:3] == own, f"{file.relative_to(PACKAGE)} imports {module}"


def test_config_modules_import_no_torch() -> None:
    for file in PACKAGE.glob("methods/*/config.py"):
        heavy = {module.split(".")[0] for module, _ in imports(file)} & {"torch", "transformers", "lightning"}
        assert not heavy, f"{file} imports {heavy}: composing a config must stay light"


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_files_hold_one_idea(file: Path) -> None:
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= 400, f"{lines} lines: split it by its ideas"


def test_the_checks_can_fail(tmp_path: Path) -> None:
    assert "right of" in forbidden("cache", "targets")
    assert "beside" in forbidden("training", "evaluation")
    assert not forbidden("jobs", "training")
    file = tmp_path / "x.py"
    file.write_text("def f():\n    import lightning.pytorch\n    from longtrain.jobs import JOBS\n")
    assert imports(file) == [("lightning.pytorch", ""), ("longtrain.jobs", "JOBS")]
