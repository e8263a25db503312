"""Systems from what was typed: names, budgets, shapes, what they are made of, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import ChildChoice, TreeShape
from longtrain.errors import ConfigError, ConflictError
from longtrain.files import sealed
from longtrain.methods.longspec.config import Config as DraftConfig
from longtrain.methods.lookaheadkv.config import Config as LookConfig
from longtrain.systems import DRAFT, EVICTOR, FULL_CACHE, Builder, parse
from longtrain.targets.loading import random_target
from tests.helpers import HEADS_OF_64

from .toys import suite, task

CHAIN = TreeShape((1, 1, 1))
TREE = TreeShape((2, 2))


@pytest.fixture(scope="module")
def artifacts(target, tmp_path_factory):
    """An untrained draft and untrained lookahead tokens, as folders."""
    found = {}
    configs = {"longspec": DraftConfig(window=16), "lookaheadkv": LookConfig(n_lookahead=4, lora_rank=2)}
    for method, config in configs.items():
        module = methods.get(method).build(config, target.info)
        made = Artifact.from_module(method, config, module=module, target=target)
        folder = tmp_path_factory.mktemp("checkpoints") / method
        made.save(folder)
        found[method] = Artifact.load(folder)
    return found


@pytest.fixture
def build(target, artifacts):
    def go(*entries, budgets=(40, 48), shapes=(CHAIN,), needs=None, greedy=True):
        roles = {EVICTOR, DRAFT} if needs is None else needs
        builder = Builder(target, [Budget(b) for b in budgets], list(shapes), artifacts.__getitem__, greedy)
        return builder.systems(entries, roles=roles, taker="suite toy")

    return go


def test_policies_at_every_budget_after_the_full_cache(build):
    found = build("snapkv", {"name": "adakv", "over": "snapkv", "floor": 0.3, "label": "ada"})
    names = ["full", "snapkv@40", "snapkv@48", "ada@40", "ada@48"]
    assert [system.name for system in found] == names
    assert [system.family for system in found] == ["full", "snapkv", "snapkv", "ada", "ada"]
    assert [system.kind for system in found] == ["full", *["policy"] * 4]
    assert [system.budget for system in found] == [None, "40", "48", "40", "48"]
    assert [s.parts.evictor.budget.tokens for s in found[1:]] == [40, 48, 40, 48]
    assert found[3].facts == {"policy": "adakv", "over": "snapkv", "floor": 0.3, "budget": "40"}
    assert len({str(system.facts) for system in found}) == 5
    assert not any(system.drafts or system.lossless_of for system in found)


def test_a_draft_at_every_shape(build):
    one = build({"artifact": "longspec"})[1]
    assert (one.name, one.family, one.kind, one.budget) == ("longspec", "longspec", "artifact", None)
    assert one.drafts and not one.evicts and one.lossless_of == "full"
    found = build({"artifact": "longspec"}, shapes=(CHAIN, TREE))
    assert [system.name for system in found[1:]] == ["longspec chain 3", "longspec tree 2-2"]
    assert found[1].parts is found[2].parts and found[1].facts != found[2].facts
    assert found[1].facts["artifacts"][0]["method"] == "longspec"
    assert len(found[1].facts["artifacts"][0]["weights"]) == 64


def test_the_same_weights_with_another_config_are_another_system(session, target, artifacts, tmp_path):
    """Exported again with another config they would go on in the old ledger."""
    draft = artifacts["longspec"]
    folder = tmp_path / "longspec"
    shutil.copytree(draft.folder, folder)
    path = folder / "longtrain.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["max_depth"] = 6
    path.write_bytes(sealed(manifest))
    again = Artifact.load(folder)
    assert again.config != draft.config
    asked, systems = suite(task(examples=1)), []
    for artifact in (draft, again):
        builder = Builder(target, (), [CHAIN], {"longspec": artifact}.__getitem__)
        system = builder.systems([{"artifact": "longspec"}])[1]
        systems.append(system)
    session(asked=asked, entries=(), systems=[FULL_CACHE, systems[0]]).work()
    with pytest.raises(ConfigError, match=r"system\.artifacts\.0\.config\.max_depth=5, and .*max_depth=6"):
        session(asked=asked, entries=(), systems=[FULL_CACHE, systems[1]]).work()


def test_artifacts_and_policies_together(build):
    found = build(
        "snapkv",
        {"artifact": "lookaheadkv", "adaptive": "heads"},
        {"artifact": ["longspec", "lookaheadkv"], "adaptive": "heads"},
        {"artifact": "longspec", "policy": "snapkv"},
        budgets=(40,),
    )
    by = {system.name: system for system in found}
    assert list(by) == [
        "full",
        "snapkv@40",
        "lookaheadkv adaptive=heads@40",
        "longspec+lookaheadkv adaptive=heads@40",
        "longspec+snapkv@40",
    ]
    both = by["longspec+lookaheadkv adaptive=heads@40"]
    assert both.kind == "combined" and both.drafts and both.evicts
    assert both.parts.evictor.adaptive == "heads" and both.parts.evictor.budget.tokens == 40
    assert both.lossless_of == "lookaheadkv adaptive=heads@40"
    assert by["longspec+snapkv@40"].lossless_of == "snapkv@40"
    alone = build({"artifact": "longspec", "policy": "snapkv"}, budgets=(40,))[1]
    assert alone.lossless_of is None  # there is nothing to compare with


def test_sampled_texts_are_compared_only_where_drafts_are_deterministic(build):
    assert build({"artifact": "longspec"}, greedy=False)[1].lossless_of == "full"
    iid = TreeShape((1, 1), ChildChoice.IID)
    assert build({"artifact": "longspec"}, shapes=(iid,), greedy=False)[1].lossless_of is None
    assert build({"artifact": "longspec"}, shapes=(iid,))[1].lossless_of == "full"


def test_texts_of_every_combination_are_those_without_the_draft(session, target, artifacts):
    asked = suite(task(examples=3, new=8))
    entries = [
        "snapkv",
        {"artifact": "longspec"},
        {"artifact": "lookaheadkv"},
        {"artifact": ["longspec", "lookaheadkv"]},
        {"artifact": "longspec", "policy": "snapkv"},
    ]
    builder = Builder(target, [Budget(40)], [CHAIN, TREE], artifacts.__getitem__)
    made = session(asked=asked, systems=builder.systems(entries))
    made.work()
    found = made.finish().results
    compared = {
        system["name"]: system["tasks"][0]["exactness"]
        for system in found["systems"]
        if system["tasks"][0]["exactness"]
    }
    assert len(compared) == 6
    assert all(exact["compared"] == 3 and exact["different"] == 0 for exact in compared.values())
    longest = max(made.records(), key=lambda record: record.prompt_tokens).example
    records = {record.system: record for record in made.records() if record.example == longest}
    assert records["longspec chain 3"].cycles and records["snapkv@40"].cycles is None
    assert all(cycle.drafted == 3 for row in records["longspec chain 3"].rows() for cycle in row)
    rows = {name: [turn.kept_entries for turn in record.turns] for name, record in records.items()}
    assert rows["full"] == [records["full"].prompt_tokens] and rows["snapkv@40"] == [40.0]


@pytest.fixture(scope="module")
def wide():
    """Heads of the size that a quantised cache needs."""
    return random_target(HEADS_OF_64, seed=0)


def test_methods_without_training_alone_and_beside_others(wide):
    builder = Builder(wide, [Budget(40)], [CHAIN], {}.__getitem__)
    alone = {"method": {"name": "quantspec", "draft": False}}
    found = builder.systems(["snapkv", alone, {"method": "quantspec"}])
    assert [system.name for system in found] == ["full", "snapkv@40", "quantspec draft=false", "quantspec"]
    cache, both = found[2:]
    assert cache.kind == both.kind == "artifact" and not cache.drafts and both.drafts
    assert cache.parts.cache is not None and both.lossless_of == cache.name and cache.lossless_of is None
    assert builder.systems([{"method": "quantspec"}])[1].lossless_of is None
    for other in ({"split": "rtn"}, {"strict_flush": False}):
        entries = [alone, {"method": {"name": "quantspec", **other}}]
        assert builder.systems(entries)[2].lossless_of is None
    weights = {"method": {"name": "quantspec", "weight_bits": 16}}  # of the draft alone
    assert builder.systems([alone, weights])[2].lossless_of == cache.name
    assert cache.facts["method"]["kv_bits"] == 4 and both.facts["shape"] == [1, 1, 1]
    with pytest.raises(ConflictError, match="bring a cache of their own and an evictor"):
        builder.systems([{"method": "quantspec", "policy": "snapkv"}])
    with pytest.raises(ConfigError, match="longspec is trained; export it and pass"):
        builder.systems([{"method": "longspec"}])
    with pytest.raises(ConfigError, match=r"^suite.systems: quantspec: unknown key 'bits'; known: draft"):
        builder.systems([{"method": {"name": "quantspec", "bits": 4}}])
    with pytest.raises(ConfigError, match=r"cache alone is \{method: \{name: quantspec, draft: false"):
        builder.systems([{"method": "quantspec"}], roles={EVICTOR})
    with pytest.raises(ConfigError, match=r"systems: method=4; allowed: NAME or \{name"):
        builder.systems([{"method": 4}])


@pytest.mark.parametrize(
    ("entries", "settings", "error", "message"),
    [
        ([7], {}, ConfigError, r"suite\.systems: entry=7; allowed: NAME of a policy"),
        ([{"label": "snapkv"}], {}, ConfigError, r"suite\.systems: entry={'label'"),
        (
            ["snap"],
            {},
            ConfigError,
            r"suite\.systems has snap: unknown eviction policy 'snap'; known: ",
        ),
        (["snap"], {}, ConfigError, r"other entries: .*\{artifact: NAME\}.*\{method: NAME\}"),
        (["snapkv", "snapkv"], {}, ConfigError, r"two systems named snapkv@40; give each once"),
        (["snapkv"], {"budgets": ()}, ConfigError, r"suite\.budgets=\[\] and snapkv evicts"),
        (["snapkv"], {"budgets": (16,)}, ConfigError, r"16 entries and snapkv always keeps 32"),
        ([{"artifact": "longspec"}], {"shapes": ()}, ConfigError, r"drafts, and decode\.shape=\[\]"),
        (
            [{"artifact": "longspec"}],
            {"needs": [EVICTOR]},
            ConfigError,
            r"longspec brings a draft, which suite toy has no use for \(it takes: evictor\)",
        ),
        (["snapkv"], {"needs": []}, ConfigError, "policy snapkv brings an evictor, .* the full cache alone"),
        (
            [{"artifact": "longspec", "depth": 3}],
            {},
            ConfigError,
            "longspec: depth=3; allowed: artifact",
        ),
        (
            [{"artifact": "lookaheadkv", "budget_tokens": 3}],
            {},
            ConfigError,
            "every system runs at the budgets of the suite",
        ),
        (
            [{"artifact": "lookaheadkv", "policy": "snapkv"}],
            {},
            ConflictError,
            "both bring the engine's evictor",
        ),
    ],
)
def test_what_cannot_be_is_refused(build, entries, settings, error, message):
    with pytest.raises(error, match=message):
        build(*entries, **settings)


def test_systems_that_name_a_cache(wide):
    builder = Builder(wide, [], [CHAIN], {}.__getitem__)
    chosen = {"cache": {"name": "int4", "split": "rtn"}}
    quantspec = {"method": "quantspec", "drafted": [2, 1]}
    found = builder.systems([{"cache": "int8"}, {"cache": "int4", "label": "half"}, chosen, quantspec])
    assert [system.name for system in found[1:4]] == [
        "int8",
        "half",
        "int4 split=rtn",
    ]
    assert {system.kind for system in found[1:4]} == {"cache"}
    kinds = [type(system.parts.cache(1, 8, 1)).__name__ for system in found[1:4]]
    assert kinds == ["HierarchicalCache", "UpperHalfCache", "UpperHalfCache"]
    assert found[1].facts["cache"] == {"name": "int8", "split": "floor"}
    assert [system.name for system in found[4:]] == ["quantspec chain 2", "quantspec chain 1"]
    assert [system.lossless_of for system in found[4:]] == ["int8", "int8"]  # the very cache it drafts for
    with pytest.raises(ConfigError, match=r"unknown cache 'int2'; known: int8, int4, elastic"):
        builder.systems([{"cache": "int2"}])
    with pytest.raises(ConfigError, match=r"cache int8\.split=half; allowed: floor, rtn"):
        builder.systems([{"cache": {"name": "int8", "split": "half"}}])
    with pytest.raises(ConfigError, match="int8 drafts nothing; leave out `drafted`"):
        builder.systems([{"cache": "int8", "drafted": [2]}])


def test_a_system_may_choose_its_shapes(wide):
    builder = Builder(wide, [], [CHAIN], {}.__getitem__)
    chosen = builder.systems([{"method": "prompt_lookup", "drafted": "auto"}])[1]
    assert chosen.name == "prompt_lookup auto" and chosen.facts["shape"] == "auto"
    assert chosen.drafts and chosen.lossless_of == "full"
    assert chosen.nodes == 1 + max(map(len, chosen.parts.draft.offers))
    prompts = [[3, 4, 5, 6] * 4]
    plain = Engine(wide).generate(prompts, max_new_tokens=12)
    made = Engine(wide, chosen.parts).generate(prompts, max_new_tokens=12, shape=chosen.shape)
    assert made.tokens == plain.tokens
    with pytest.raises(ConfigError, match="left out beside drafted=auto"):
        builder.systems([{"method": "prompt_lookup", "drafted": "auto", "shapes": [[1, 1]]}])
    with pytest.raises(ConfigError, match="int8 drafts nothing"):
        builder.systems([{"cache": "int8", "drafted": "auto"}])


def test_random_weights_stand_in_for_training(target):
    builder = Builder(target, [Budget(40)], [CHAIN], {}.__getitem__, random_seed=3)
    draft, evictor = (
        builder.of(parse(entry))[0]
        for entry in (
            {"name": "longspec", "window": 16, "acceptance": 0.9, "shapes": [[2, 2]]},
            {"method": {"name": "lookaheadkv", "n_lookahead": 4}},
        )
    )
    assert draft.drafts and draft.shape.widths == (2, 2) and draft.name == "longspec window=16"
    assert draft.acceptance == draft.facts["acceptance"] == 0.9 and draft.facts["method"]["random_seed"] == 3
    assert evictor.evicts and evictor.name == "lookaheadkv n_lookahead=4@40"
    with pytest.raises(ConfigError, match="acceptance=2; allowed: a number from 0 to 1"):
        parse({"method": "longspec", "acceptance": 2})


def test_on_a_quantised_cache_untrained_drafts_repeat_its_texts(wide):
    """QuantSpec's cache without its draft is what they are compared with."""
    builder = Builder(wide, [], [CHAIN], {}.__getitem__)
    alone = {"method": {"name": "quantspec", "draft": False}}
    drafts = [{"method": {"name": name, "cache": "hierarchical"}} for name in ("magicdec", "prompt_lookup")]
    found = builder.systems([alone, *drafts, {"method": {"name": "quantspec", "split": "rtn"}}])
    assert [system.lossless_of for system in found[2:]] == [found[1].name, found[1].name, None]
    assert found[2].name == "magicdec cache=hierarchical" and found[2].parts.cache is not None
    with pytest.raises(ConfigError, match=r"prompt_lookup: cache=int4; allowed: plain, hierarchical"):
        builder.systems([{"method": {"name": "prompt_lookup", "cache": "int4"}}])


def test_look_up_beside_a_draft_alone_or_off(wide):
    """Three systems of one draft in one run; the run's own setting is for entries that do not say it."""
    entries = [{"method": "quantspec", "lookup": how} for how in ("auto", "only", False)]
    found = Builder(wide, [], [CHAIN], {}.__getitem__).systems(entries)[1:]
    assert [one.name for one in found] == [
        "quantspec+lookup auto",
        "quantspec+lookup only",
        "quantspec",
    ]
    assert [one.shape.n_nodes for one in found] == [16, 4, 4]
    assert [one.facts.get("lookup") for one in found] == ["auto", "only", None]
    assert [one.facts.get("copied") for one in found] == [12, None, None]
    assert all(one.drafts and one.parts.cache is not None for one in found)
    (run,) = Builder(wide, [], [CHAIN], {}.__getitem__, lookup="auto").systems(["quantspec"])[1:]
    assert run.name == "quantspec" and run.shape.copied == 12 and run.facts["lookup"] == "auto"
    twice = Builder(wide, [], [CHAIN], {}.__getitem__).systems(
        [{"method": "quantspec", "lookup": "auto", "drafted": [2, 4]}]
    )
    assert [one.name for one in twice[1:]] == [
        "quantspec+lookup auto chain 2",
        "quantspec+lookup auto chain 4",
    ]
    with pytest.raises(ConfigError, match="lookup=always; allowed: auto, off, only"):
        parse({"method": "quantspec", "lookup": "always"})


def test_look_up_beside_a_policy(wide):
    builder = Builder(wide, [Budget(40)], [CHAIN], {}.__getitem__)
    found = builder.systems(["snapkv", {"name": "snapkv", "lookup": "only"}])
    assert [one.name for one in found] == ["full", "snapkv@40", "snapkv+lookup only@40"]
    both = found[2]
    assert both.drafts and both.evicts and both.lossless_of == "snapkv@40" and both.kind == "combined"
    for entry in ({"name": "snapkv", "lookup": "auto"}, {"cache": "int8", "lookup": "auto"}):
        with pytest.raises(ConfigError, match="has no draft for lookup=auto to join; pass lookup=only"):
            builder.systems([entry])
