"""Faults of a module, and whether golden outputs refuse them: `python tests/artifact/mutations.py TARGET`.

Every method's module is recorded on a target, then asked again with one thing wrong: its positions, its
rotary base, its window, the target's layer that it reads, a setting, a tensor, a norm. The table says by how
many times the limit of the comparisons in fp32 each is off. TARGET is a folder, a Hub id or `tiny`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from longtrain import methods, tables
from longtrain.artifact import Artifact
from longtrain.artifact.golden import Attach, Golden
from longtrain.artifact.golden.checks import FAR, refuse
from longtrain.errors import ArtifactError, ConfigError
from longtrain.targets.loading import load_target
from longtrain.targets.model import Target

METHODS = ("longspec", "eagle3", "lookaheadkv", "specontext", "kvzap", "indexer")
GAINS = {"eagle3": 4.0}
"""See `module_of`; longspec begins with the target's own attention, the others are sharp as they are."""
READ_THE_TARGETS_KEYS = ("longspec", "lookaheadkv")
"""To other methods only the distance of two positions is visible, so all of them may be off by one."""
SETTINGS: dict[str, tuple[Any, ...]] = {
    "window": (1,),
    "suffix_window": (1,),
    "kv_source_layer": (-1,),
    "lora_alpha": (1.0,),
    "conv": (-1,),
    "pool_kernel": (-2,),
}
"""Setting -> what is added to it; those of lists and words are in `other_settings`."""


def verify(golden: Golden, attach: Attach, target: Target) -> float:
    """Compare a module with golden outputs: the relative distance in fp32, or the error of a failed check."""
    checks = golden.measure(attach, target)
    refuse(checks)
    return checks[0].error


class Turned:
    """A target, or a view of one, whose rotary embedding is another to whoever reads it through this."""

    def __init__(self, target: Any, *, late: int | None = None, base: float = 1.0) -> None:
        self._target, self._late, self._base = target, late, base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def rope(self, pos_BT: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
        """Cos and sin, of the next position from position `late` on, or of another base."""
        if self._late is not None:
            return self._target.rope(pos_BT + (pos_BT >= self._late), dtype=dtype)
        half = self._target.info.head_dim // 2
        place_D = torch.arange(half, device=pos_BT.device) / half
        theta = float(self._target.info.rope.get("rope_theta", 1e4)) * self._base
        angle_BTD = (pos_BT[..., None].float() / theta**place_D).repeat(1, 1, 2)
        dtype = dtype or self._target.dtype
        return angle_BTD.cos().to(dtype), angle_BTD.sin().to(dtype)

    @property
    def rotation(self) -> Any:
        """The same, as kernels take it."""
        return self.rope


def module_of(
    name: str, target: Target, *, seed: int = 0, gain: float = 1.0, **settings: Any
) -> tuple[Any, torch.nn.Module]:
    """A method's settings and a module as training begins with it, every tensor moved a little.

    Args:
        name: the method.
        target: the frozen target.
        seed: of what is random.
        gain: factor on all matrices; attention of fresh ones is so flat that positions hardly matter.
        settings: other than the defaults.
    """
    spec = methods.get(name)
    config = spec.config(**settings)
    torch.manual_seed(seed)
    module = spec.build(config, target.info)
    if spec.objective is not None and target.tokenizer is not None:
        spec.objective(module, target, config)  # a warm start, where the method has one
    with torch.no_grad():
        for weight in module.parameters():
            size = float(weight.float().square().mean().sqrt())
            weight += torch.randn_like(weight) * (0.1 * size or 0.1)
            weight *= gain if weight.dim() > 1 else 1.0
    return config, module.to(target.device, target.dtype).eval().requires_grad_(False)


def made_of(name: str, target: Target, *, seed: int = 0, **settings: Any) -> Artifact:
    """An artifact of `module_of`, its golden outputs recorded."""
    config, module = module_of(name, target, seed=seed, **settings)
    return Artifact.from_module(name, config, module=module, target=target)


def mutations(made: Artifact) -> Iterator[tuple[str, Attach]]:
    """Each fault that the artifact's method can have, and what makes its parts."""
    if made.method in READ_THE_TARGETS_KEYS:
        yield "positions off by one", lambda view: made._parts(Turned(view, late=0))
    yield "positions off by one from 32 on", lambda view: made._parts(Turned(view, late=32))
    yield "another rotary base", lambda view: made._parts(Turned(view, base=0.5))
    for what, config in other_settings(made):
        yield what, dataclasses.replace(made, config=config)._parts
    for what, tensors in other_tensors(made.tensors):
        yield what, dataclasses.replace(made, tensors=tensors)._parts


def other_settings(made: Artifact) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration with one value changed that tensors of the same shapes go with."""
    for key, steps in SETTINGS.items():
        if made.config.get(key):
            for step in steps:
                yield f"{key} {step:+g}", {**made.config, key: made.config[key] + step}
    if made.config.get("adaptive") is not None:
        yield "adaptive budgets", {**made.config, "adaptive": "heads"}
    if made.config.get("reduction"):
        yield "reduction over heads", {**made.config, "reduction": "max"}
    if "layers" in made.config and made.golden is not None:
        read = sorted(int(name[7:]) for name in made.golden.inputs if name.startswith("hidden_"))
        if len(read) > 1:
            yield "another layer's states", {**made.config, "layers": [read[0] + 1, *read[1:]]}


def other_tensors(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The tensors with one changed, or two swapped; of tensors that layers share the first and the last."""
    kinds: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            kinds.setdefault(re.sub(r"\.\d+\.", ".N.", name), []).append(name)
    chosen = [name for names in kinds.values() for name in dict.fromkeys((names[0], names[-1]))]
    if "table_LG" in tensors:
        yield "reversed: table_LG", {**tensors, "table_LG": tensors["table_LG"].flip(0)}
    for name in chosen:
        changed = tensors[name].clone()
        rows = changed[: max(1, len(changed) // 8)]
        rows.copy_(rows[torch.randperm(len(rows))].flip(-1) * 1.5)
        yield f"changed: {name}", {**tensors, name: changed}
        if "norm" in name:
            yield f"left out: {name}", {**tensors, name: torch.ones_like(tensors[name])}
    for name in chosen:
        same = [
            other
            for other in chosen
            if other > name and tensors[other].shape == tensors[name].shape and "norm" not in name
        ]
        if same:
            yield (
                f"swapped: {name}, {same[0]}",
                {
                    **tensors,
                    name: tensors[same[0]],
                    same[0]: tensors[name],
                },
            )


def table(made: Artifact, target: Target) -> list[dict[str, Any]]:
    """A line for each fault: its margin in fp32, what refused it, and whether it was refused.

    `checksum alone`: of a tensor or a setting whose change moves outputs by less than the limit in fp32, or
    that they do not depend on; it is refused where it is read from disk. `unused`: the module has no rotary
    embedding.
    """
    assert made.golden is not None
    right, lines = made.golden.measure(made._parts, target), []
    assert all(check.passed for check in right), right
    for what, attach in mutations(made):
        line: dict[str, Any] = {"method": made.method, "mutation": what}
        try:
            checks = made.golden.measure(attach, target)
        except (ArtifactError, ConfigError) as error:
            lines.append({**line, "margin": None, "by": str(error), "outcome": "refused"})
            continue
        exact = [check for check in checks if "fp32" in check.what or check.limit == 0]
        worst = max(exact, key=lambda check: check.share)
        failed = next((check for check in checks if not check.passed), None)
        same = [check.error for check in checks] == [check.error for check in right]
        on_disk = not what.startswith(("positions", "another rotary"))
        outcome = "checksum alone" if on_disk else "unused" if same else "ACCEPTED"
        lines.append(
            {
                **line,
                "margin": min(FAR, worst.share),
                "error": worst.error,
                "limit": worst.limit,
                "by": str(failed or worst),
                "outcome": "refused" if failed else outcome,
            }
        )
    return lines


def _keep(path: Path, title: str, method: str, lines: list[dict[str, Any]]) -> None:
    """Add the lines of a method to a file of tables; those of the same title and method are replaced."""
    found = json.loads(path.read_text()) if path.is_file() else {"commands": [], "tables": {}}
    others = [line for line in found["tables"].get(title, []) if line["method"] != method]
    found["tables"][title] = others + [line for line in lines if line["method"] == method]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Print the tables of a target, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--artifacts", nargs="*", default=[], help="of this target, instead of fresh modules")
    parser.add_argument("--json", type=Path, help="tables that it holds already are kept")
    asked = parser.parse_args()
    target = load_target(asked.target, dtype=asked.dtype, device=asked.device)
    if asked.artifacts:
        found = [Artifact.load(name) for name in asked.artifacts]
    else:
        found = [made_of(name, target, gain=GAINS.get(name, 1.0)) for name in asked.methods]
    title = f"{Path(asked.target).name} in {asked.dtype} on {asked.device}"
    title += f", {', '.join(asked.artifacts)}" if asked.artifacts else ""
    lines = []
    for made in found:
        lines += table(made, target)
        if asked.json:
            _keep(asked.json, title, made.method, lines)
    shown = [
        (
            line["method"],
            line["mutation"],
            *(
                tables.number(line[key]) if line.get(key) is not None else "-"
                for key in ("error", "limit", "margin")
            ),
            line["outcome"],
        )
        for line in lines
    ]
    tables.print_lines(
        f"\n{title}\n", tables.markdown(("method", "mutation", "error", "limit", "margin", "outcome"), shown)
    )
    if accepted := [line for line in lines if line["outcome"] == "ACCEPTED"]:
        raise SystemExit(f"{len(accepted)} of {len(lines)} faults are accepted")


if __name__ == "__main__":
    main()
