"""The folder for SGLang: its class reads the rows that our runtime reads, and what cannot be served is said.

SGLang's interface is stood in for here; tests/interop/test_sglang.py runs SGLang's own files.
"""

from __future__ import annotations

import importlib.util
import json
from enum import Enum, auto
from types import SimpleNamespace

import pytest
import torch

from longtrain.artifact import Artifact
from longtrain.decoding.engine import Engine
from longtrain.errors import ArtifactError, ConfigError
from longtrain.files import write_files
from longtrain.methods.specontext.config import Config
from longtrain.methods.specontext.modules import RetrievalHead
from longtrain.methods.specontext.sglang import FORMATS
from longtrain.methods.specontext.spec import SPEC
from longtrain.targets.loading import random_target
from tests.methods.specontext.served import Served

ONE = {"variant": "embedding", "n_heads": 3, "n_kv_heads": 1, "mapping": "calibrated"}
HEADS = {
    "one set": Config(**ONE, conv=3),
    "two groups of layers, own keys, of the feature's row": Config(
        **ONE, sets=2, share_keys=False, qk_norm=True, attention_bias=True, row="feature"
    ),
    "groups share keys, own shape and angles": Config(
        **ONE, sets=2, head_dim=8, rope={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "an MLP before queries and keys": Config(**ONE, mlp=24),
}
KEYS = {"budget_tokens": 14, "sinks": 2, "window": 4}
NEW = 12


class Modes(Enum):
    """The two of SGLang's modes that occur."""

    EXTEND, DECODE = auto(), auto()

    def is_extend(self):
        return self is Modes.EXTEND

    def is_decode(self):
        return self is Modes.DECODE

    is_decode_or_idle = is_decode

    def is_target_verify(self):
        return False


@pytest.fixture(scope="module")
def target():
    return random_target("llama_micro", seed=1)


def head_of(config, target):
    torch.manual_seed(4)
    head = RetrievalHead(config, target.info)
    for name, p in head.named_parameters():
        p.data = 1 + 0.2 * torch.randn_like(p) if "norm" in name else torch.randn_like(p) * 0.25
    return head


def exported(folder, config, target):
    """The folder, whole; the head's module."""
    head = head_of(config, target)
    write_files(folder, FORMATS.write("sglang", head.state_dict(), config, target, {}, folder.name))
    return head


def decoded(head, config, target, prompts):
    """Texts of plain sparse decoding, and the rows that each step's sets hold: [step][request][layer]."""
    selector, seen = SPEC.attach(head, target, config, KEYS).selector, []
    observe = selector.observe

    def noted(*args):
        sets, table = selector.cache.entry_sets, selector.table_LG[:, 0]
        rows = zip(sets.idx_BXK, sets.n_B, strict=True)
        seen.append([[set_XK[x, :n].tolist() for x in table] for set_XK, n in rows])
        observe(*args)

    selector.observe = noted
    parts = SPEC.attach(head, target, config, KEYS)
    parts = type(parts)(selector=selector, name="noted")
    new = Engine(target, parts).generate(prompts, max_new_tokens=NEW, ignore_eos=True).tokens
    return [[*prompt, *tokens] for prompt, tokens in zip(prompts, new, strict=True)], seen


def prompts_of():
    gen = torch.Generator().manual_seed(7)
    first = torch.randint(2, 97, (47,), generator=gen).tolist()
    return [first, first[:5], [*first[:29], 8, 9, 10]]


def algorithm_of(folder, page=1, **more):
    """The class as it stands in the folder."""
    spec = importlib.util.spec_from_file_location("specontext_sglang", folder / "specontext_sglang.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    extra = {"sinks": KEYS["sinks"], "window": KEYS["window"], **more}
    config = SimpleNamespace(top_k=KEYS["budget_tokens"], page_size=page, sparse_extra_config=extra)
    return module.SpeContextAlgorithm(config, torch.device("cpu"))


def replayed(algorithm, texts, prompts, layers, page=1):
    """Pages of each step: [step][request][layer]."""
    served = Served(texts, [len(prompt) for prompt in prompts], page, Modes)
    served.layers = layers
    algorithm.initialize_representation_pool(0, layers, served.kv_pool, served.pool, None)
    everybody = torch.ones(len(texts), dtype=torch.bool)

    def end(layer, batch):
        given = (layer, batch.req_pool_indices, batch.seq_lens, served.keys, batch)
        algorithm.construct_representations(*given)
        algorithm.update_representations(*given)

    def begin(layer, batch):
        pages, counts = algorithm.retrieve_topk(
            torch.empty(3, 4), layer, batch.req_pool_indices, everybody, forward_batch=batch
        )
        assert bool((torch.arange(pages.shape[1]) < counts[:, None]).eq(pages >= 0).all())
        return [row[:n].tolist() for row, n in zip(pages, counts, strict=True)]

    served.prefill(end)
    assert served.shared > 0
    steps = [served.decode(step, begin, end) for step in range(NEW - 1)]
    return [[list(layers) for layers in zip(*step, strict=True)] for step in steps]


@pytest.mark.parametrize("name", HEADS)
def test_the_class_reads_the_rows_that_our_runtime_reads(name, target, tmp_path):
    """Token for token, and the step's own token; a prompt in parts, a shared prefix, slots in no order."""
    config, prompts = HEADS[name], prompts_of()
    head = exported(tmp_path, config, target)
    texts, ours = decoded(head, config, target, prompts)
    theirs = replayed(algorithm_of(tmp_path), texts, prompts, target.info.n_layers)
    lengths = [len(prompt) for prompt in prompts]
    for step, (mine, found) in enumerate(zip(ours, theirs, strict=True)):
        for b, at in enumerate(lengths):
            assert found[b] == [[*rows, at + step] for rows in mine[b]]
    assert len({tuple(rows) for step in ours for rows in step[0]}) > NEW // 2
    assert (ours[0][0][0] != ours[0][0][-1]) == (config.sets > 1)


def test_pages_are_chosen_by_their_best_row(target, tmp_path):
    config, prompts, page = HEADS["one set"], prompts_of(), 4
    head = exported(tmp_path, config, target)
    texts, _ = decoded(head, config, target, prompts)
    theirs = replayed(algorithm_of(tmp_path, page), texts, prompts, target.info.n_layers, page)
    selector = SPEC.attach(head, target, config, KEYS).selector
    rope, text = selector._rope, torch.tensor(texts[0])
    embed = torch.cat((torch.zeros(2, 48), target.embed(text))).unfold(0, 3, 1).transpose(1, 2)
    entry, turn = head.entry(embed, ()), rope(torch.arange(len(text)))
    q, k = head.query(entry, turn), head.key(entry, turn)[:, 0]
    for step in range(NEW - 1):
        n = len(prompts[0]) + step
        score = (q[n] @ k[:n].T * head.dim**-0.5).log_softmax(-1).amax(0)
        forced = {0, *range((n - 4) // page, n // page + 1)}
        ranked = sorted({*range(n // page)} - forced, key=lambda p: -score[p * page : (p + 1) * page].max())
        outputs = sorted([*forced, *ranked[: 5 - len(forced)]])
        assert theirs[step][0] == [outputs] * target.info.n_layers


def test_what_sglang_cannot_serve_is_refused(target):
    with pytest.raises(
        ConfigError, match=r"tokens and no hidden states.*method\.variant=shifted.*train with"
    ):
        FORMATS.refuse("sglang", Config(), None)
    own = Config(variant="embedding")
    with pytest.raises(ConfigError, match=r"gives each of 2 its own; train with method\.sets=1 method\.n_kv"):
        FORMATS.refuse("sglang", own, target.info)
    head = head_of(HEADS["one set"], target)
    torn = head_of(HEADS["groups share keys, own shape and angles"], target)
    torn.table_LG[1] = torch.tensor([0, 1])
    with pytest.raises(ConfigError, match="those of layer 1 read sets 0, 1"):
        FORMATS.write("sglang", torn.state_dict(), list(HEADS.values())[2], target, {}, "x")
    assert "README.md" in FORMATS.write("sglang", head.state_dict(), HEADS["one set"], target, {}, "x")


def test_the_folder_serves_as_an_artifact_and_tells_of_damage(target, tmp_path):
    folder = tmp_path / "made"
    head = exported(folder, HEADS["one set"], target)
    artifact = Artifact.load(folder)
    prompts = prompts_of()
    selector = artifact.attach(target, **KEYS)
    made = Engine(target, selector).generate(prompts, max_new_tokens=4, ignore_eos=True).tokens
    own = SPEC.attach(head, target, HEADS["one set"], KEYS)
    assert made == Engine(target, own).generate(prompts, max_new_tokens=4, ignore_eos=True).tokens
    assert "embeddings are the target's" in FORMATS.verify(folder, target, None)
    other = random_target("llama_micro", seed=2)
    other = type(other)(other.model, target.info, None)
    with pytest.raises(ArtifactError, match=r"embed_tokens\.weight is no copy"):
        FORMATS.verify(folder, other, None)
    about = json.loads((folder / "specontext.json").read_text())
    (folder / "specontext.json").write_text(json.dumps(about | {"shift": 1}))
    with pytest.raises(ArtifactError, match=r"specontext\.json is not what was exported"):
        FORMATS.verify(folder, None, None)


def test_settings_of_the_class(target, tmp_path):
    exported(tmp_path, HEADS["one set"], target)
    with pytest.raises(ValueError, match="no key 'windows'"):
        algorithm_of(tmp_path, windows=3)
    with pytest.raises(ValueError, match=r"top_k=14 with sinks=2, window=12 .* allowed: more than 14"):
        algorithm_of(tmp_path, window=12)
    algorithm = algorithm_of(tmp_path)
    batch = SimpleNamespace(forward_mode=Modes.EXTEND)
    with pytest.raises(ValueError, match="at decoding steps alone"):
        algorithm.retrieve_topk(torch.empty(1), 0, torch.zeros(1), torch.ones(1), forward_batch=batch)
    verify = SimpleNamespace(is_extend=lambda: True, is_target_verify=lambda: True)
    algorithm.start_layer = 0
    with pytest.raises(ValueError, match="no speculative decoding"):
        algorithm.construct_representations(0, None, None, None, SimpleNamespace(forward_mode=verify))
