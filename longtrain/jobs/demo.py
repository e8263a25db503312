"""Show what drafting and eviction do, on one prompt: two decodings side by side, then the evicted cache, and
what was measured on published models.

Shapes: L layers, G KV heads, S prompt tokens.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from longtrain import methods
from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, LongtrainError
from longtrain.jobs.demo_screen import DemoScreen
from longtrain.jobs.generate import read_prompt
from longtrain.jobs.setup import load_artifact, load_target
from longtrain.settings import Count, convert

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.config import RunConfig
    from longtrain.decoding.engine import Generation
    from longtrain.decoding.output import Stream
    from longtrain.decoding.roles import Parts
    from longtrain.targets.model import Target

SNAPKV = "snapkv"
"""The policy without training that an artifact is compared with."""


def run(cfg: RunConfig) -> None:
    """Decode one prompt plainly, with a draft, and on an evicted cache, and show the results.

    Raises:
        ConfigError: no artifact has a draft.
        ConflictError: two artifacts have the same role.
        ArtifactError: an artifact does not exist, is damaged, or belongs to another target.
        DataError: the prompt file cannot be read.
        LongtrainError: the two texts differ.
    """
    shipped = json.loads((asset_dir("bundled") / "demo.json").read_text(encoding="utf-8"))
    where = cfg.generate.prompt_file
    own = {"prompt": read_prompt(where), "begun": ""} if where else {}
    prompt, begun = ({**shipped, **own}[key] for key in ("prompt", "begun"))
    budget = convert(cfg.evict.budget_tokens, Count, "evict.budget_tokens")
    count = cfg.decode.max_new_tokens
    names = cfg.artifacts
    artifacts = [load_artifact(name, cfg.artifact_source) for name in names]
    target = load_target(cfg.target, seed=cfg.seed, path=artifacts[0].target.name if artifacts else None)
    draft, evictors = _parts(target, artifacts, budget)
    ids = target.encode(prompt, chat=bool(target.require_tokenizer().chat_template))
    screen = DemoScreen(target)
    screen.say(
        f"The target {target.info.name} on {target.device.type}, with {' and '.join(names)}: their golden "
        "outputs were verified. Nothing is trained, fetched or written."
    )
    screen.prompt(prompt, len(ids))
    plain, drafted = _side_by_side(screen, target, draft, ids, count)
    screen.compared(plain, drafted)
    if begun:
        ids += target.require_tokenizer()(begun, add_special_tokens=False).input_ids
    made = {name: _generate(target, parts, ids, count) for name, parts in evictors.items()}
    screen.kept(ids, begun, next(iter(made)), made[next(iter(made))], budget)
    whole = {"whole cache": _generate(target, None, ids, count)}
    screen.texts(begun, whole | {f"{budget} entries, {name}": one for name, one in made.items()})
    screen.published(shipped["published"])


def _parts(target: Target, artifacts: list[Artifact], budget: int) -> tuple[Parts, dict[str, Parts]]:
    """The draft, and the evictors: that of an artifact, if any, and SnapKV."""
    from longtrain.decoding.evict import Budget
    from longtrain.decoding.roles import Parts
    from longtrain.methods import policies

    found = Parts()
    for artifact in artifacts:
        evicts = "budget_tokens" in methods.get(artifact.method).inference_keys
        keys: dict[str, Any] = {"budget_tokens": budget} if evicts else {}
        found = found.merge(artifact.attach(target, **keys))
    if found.draft is None:
        named = ", ".join(artifact.method for artifact in artifacts) or "none"
        raise ConfigError(
            f"the demo needs an artifact that drafts, and the methods of those named are: {named}; pass "
            "artifact=tiny_longspec, or artifact=[DRAFT,EVICTION]"
        )
    evictors = [found.evictor] if found.evictor is not None else []
    evictors.append(policies.get(SNAPKV, budget=Budget(budget)))
    return Parts(draft=found.draft), {one.name: Parts(evictor=one) for one in evictors}


def _side_by_side(
    screen: DemoScreen, target: Target, draft: Parts, ids: list[int], count: int
) -> tuple[Generation, Generation]:
    """Decode plainly and with the draft, displaying both outputs while they are generated."""
    with screen.growing("plain decoding", "speculative decoding") as columns:
        plain, drafted = (
            _generate(target, parts, ids, count, stream=column.take)
            for column, parts in zip(columns, (None, draft), strict=True)
        )
    if plain.tokens != drafted.tokens:
        raise LongtrainError(
            "the two texts differ, and greedy speculative text is that of plain decoding; please report it "
            "with the output of: longtrain config demo"
        )
    return plain, drafted


def _generate(
    target: Target, parts: Parts | None, ids: list[int], count: int, stream: Stream | None = None
) -> Generation:
    from longtrain.decoding.engine import Engine

    return Engine(target, parts).generate([ids], max_new_tokens=count, stream=stream)
