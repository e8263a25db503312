"""Classes of speculators, vLLM, SGLang and DeepSpec compute what longtrain does for block drafts.

What is not run: attention kernels and servers. The engines' own files come with their wheels for GPUs, and
run here without compiled libraries; the workers say what stands in for those.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_drafts import (
    ANCHORS,
    CASES,
    PARTS,
    TOKENS,
    WINDOWS,
    apart,
    exported,
    inputs_of,
    our_blocks,
    small_target,
)
from environments import Environment, run
from safetensors.torch import load_file, save_file
from test_speculators import SPECULATORS
from torch import Tensor

from longtrain.artifact import Artifact
from longtrain.data.packing.batch import Batch
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import TreeShape, usual_children
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.formats.verify import window_less
from longtrain.methods.dspark.formats.write import draft_of_heads
from longtrain.methods.dspark.modules import DSparkDraft
from longtrain.methods.dspark.objective import DSparkObjective
from longtrain.targets.model import Target
from longtrain.targets.step import OutputRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
VLLM = Environment(
    "vllm-0.33.0-files",
    needs=(
        *(
            "torch==2.13.0+cpu",
            "transformers==5.19.0",
            "blake3",
            "cachetools",
            "cbor2",
            "cloudpickle",
            "einops",
        ),
        *(
            "fastapi",
            "gguf",
            "ijson",
            "jinja2",
            "llguidance",
            "msgspec",
            "openai>=2",
            "openai-harmony",
            "pillow",
        ),
        *(
            "prometheus-client",
            "psutil",
            "py-cpuinfo",
            "pybase64",
            "pydantic>=2",
            "pyzmq",
            "regex",
            "requests",
        ),
        *(
            "safetensors",
            "sentencepiece",
            "setproctitle",
            "setuptools",
            "six",
            "tiktoken",
            "uvloop",
            "aiohttp",
        ),
        *("watchfiles", "xgrammar", "partial-json-parser", "numpy", "tqdm", "rich", "typer", "loguru"),
    ),
    alone=("vllm==0.33.0",),
)
"""What importing vLLM's models takes; nothing of it is compiled."""
SGLANG = Environment(
    "sglang-0.5.23-files",
    needs=("torch==2.13.0+cpu", "transformers==5.19.0", "msgspec", "numpy", "safetensors"),
    alone=("sglang==0.5.23",),
)
ENGINES = {"vllm": (VLLM, "vllm_block_worker.py"), "sglang": (SGLANG, "sglang_block_worker.py")}
READ = (("vllm", "speculators"), ("vllm", "flat"), ("sglang", "flat"))
Made = tuple[DSparkDraft, Config, dict[str, Tensor]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target]:
    folder = tmp_path_factory.mktemp("blocks")
    return folder, small_target(folder / "target")


def written(folder: Path, target: Target, form: str) -> tuple[dict[str, Any], dict[str, Made]]:
    """A folder and inputs for every case of a format, as a worker's job, and what ours are made of."""
    job: dict[str, Any] = {"target": str(folder / "target"), "cases": {}}
    made: dict[str, Made] = {}
    cases = {**CASES, **WINDOWS, **(PARTS if form == "speculators" else {})}
    for index, (name, fields) in enumerate(cases.items()):
        path, kept = folder / f"{form}-{index}", folder / f"{form}-{index}.safetensors"
        module, config = exported(path, form, fields, target)
        inputs = inputs_of(config, index)
        save_file({**inputs, "width": torch.tensor(48)}, kept)
        case = {"folder": str(path), "inputs": str(kept), "method": draft_of_heads(config)}
        job["cases"][name] = {**case, "drafted": config.block_size}
        made[name] = (module, config, inputs)
    return job, made


def results(python: Path, worker: str, job: dict[str, Any], folder: Path) -> dict[str, dict[str, Tensor]]:
    """What a worker computes, by case."""
    (folder / "job.json").write_text(json.dumps(job))
    result = folder / f"{worker}.safetensors"
    run(python, Path(__file__).with_name(worker), folder / "job.json", result, TORCHDYNAMO_DISABLE="1")
    found: dict[str, dict[str, Tensor]] = {}
    for key, part in load_file(result).items():
        name, _, what = key.rpartition(".")
        found.setdefault(name, {})[what] = part
    return found


@pytest.fixture(scope="module")
def by_speculators(served: tuple[Path, Target]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Made]]:
    job, made = written(*served, "speculators")
    return results(SPECULATORS.python(), "speculators_block_worker.py", job, served[0]), made


@pytest.mark.parametrize("name", [*CASES, *WINDOWS, *PARTS])
def test_speculators_class(served: tuple[Path, Target], by_speculators: Any, name: str) -> None:
    theirs, (module, config, inputs) = by_speculators[0][name], by_speculators[1][name]
    far = apart(our_blocks(module, config, served[1], inputs), theirs)
    print(f"{name}: largest difference {far:.2e}")  # noqa: T201
    assert far < 3e-5 and float(theirs["logits"].abs().max()) > 1


@pytest.fixture(scope="module", params=READ, ids="-".join)
def by_engine(request: pytest.FixtureRequest, served: tuple[Path, Target]) -> Any:
    engine, form = request.param
    job, made = written(*served, form)
    environment, worker = ENGINES[engine]
    return results(environment.python(), worker, job, served[0]), made, engine, form


def greedy(
    module: DSparkDraft, target: Target, hidden: Tensor, first: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Greedy chains from slots' states, after the anchors, and their confidence."""
    ids_K, head = module.draft_ids_K, target.head if module.lm_head is None else module.lm_head
    before, tokens, confidence = first, [], []
    for slot in range(hidden.shape[1]):
        logits = head(hidden[:, slot])
        if module.markov_head is not None:
            logits = module.markov_head(logits, hidden[:, slot], before)
            if module.confidence_head is not None:
                embed = module.markov_head.markov_w1(before)
                confidence.append(module.confidence_head(hidden[:, slot], embed).sigmoid())
        before = logits.argmax(-1) if ids_K is None else ids_K[logits.argmax(-1)]
        tokens.append(before)
    return torch.stack(tokens, 1), torch.stack(confidence, 1) if confidence else None


@torch.no_grad()
@pytest.mark.parametrize("name", [*CASES, *WINDOWS, *PARTS])
def test_engines_class(served: tuple[Path, Target], by_engine: Any, name: str) -> None:
    found, made, engine, form = by_engine
    if name in PARTS and form == "flat":
        pytest.skip("flat folders, which SGLang reads too, have no LM head of the draft's own")
    theirs, (module, config, inputs) = found[name], made[name]
    assert config.layers is not None
    # inputs of layers, or outputs
    counted = 1 if engine == "vllm" else 0
    assert theirs["layers"].tolist() == [layer + counted for layer in config.layers]
    assert theirs["mask"].tolist() == module.mask_id.tolist()
    moving = window_less(form) if config.windows else None
    ours = our_blocks(module, config, served[1], inputs, less=moving)["hidden"]
    far = float((ours - theirs["hidden"]).abs().max())
    print(f"{engine}, {form}, {name}: largest difference {far:.2e}")  # noqa: T201
    assert far < 3e-5
    tokens, confidence = greedy(module, served[1], ours, inputs["ids"][inputs["anchors"]])
    assert torch.equal(tokens, theirs["tokens"])
    if confidence is not None:
        torch.testing.assert_close(confidence, theirs["confidence"], rtol=1e-4, atol=1e-5)
    if config.windows:
        still = our_blocks(module, config, served[1], inputs)["hidden"]
        assert float((still - theirs["hidden"]).abs().max()) > 1e-2, "their windows move with the slot"


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_our_engine_drafts_what_theirs_drafts(
    served: tuple[Path, Target], by_engine: Any, name: str, tmp_path: Path
) -> None:
    """The same blocks from the target's own states, in our runtime with its cache."""
    _, made, engine, form = by_engine
    _, config, inputs = made[name]
    target, ids = served[1], inputs["ids"]
    folder = tmp_path / "draft"
    exported(folder, form, {**CASES[name]}, target)
    parts = Artifact.load(folder).attach(target)
    assert parts.draft is not None
    shape = TreeShape((1,) * config.block_size, usual_children((1,) * config.block_size, sampled=False))
    drafted: list[list[int]] = []
    propose = parts.draft.propose

    def noting(*args: Any) -> Any:
        tree = propose(*args)
        drafted.append(tree.tokens_BN[0].tolist())
        return tree

    parts.draft.propose = noting  # type: ignore[method-assign]
    prompt = ids[: ANCHORS[2]].tolist()
    Engine(target, parts).generate([prompt], max_new_tokens=4, shape=shape, ignore_eos=True)
    chain = drafted[0]
    assert config.layers is not None
    text = torch.tensor([*prompt, chain[0]])
    step = target.packed(
        text, torch.arange(len(text)), (0, len(text)), OutputRequest("none", hidden=tuple(config.layers))
    )
    states = torch.cat([step.hidden[layer] for layer in config.layers], -1)
    padded = torch.zeros(TOKENS, states.shape[1])
    padded[: len(states)] = states
    job_ids = torch.zeros(TOKENS, dtype=torch.long)
    job_ids[: len(text)] = text
    place = torch.tensor([len(prompt)])
    save_file({"states": padded, "ids": job_ids, "anchors": place}, tmp_path / "inputs")
    case = {"folder": str(folder), "inputs": str(tmp_path / "inputs"), "method": draft_of_heads(config)}
    job = {"target": str(served[0] / "target"), "cases": {name: {**case, "drafted": config.block_size}}}
    environment, worker = ENGINES[engine]
    theirs = results(environment.python(), worker, job, tmp_path)[name]
    assert theirs["tokens"][0].tolist() == chain[1:]


OF_DEEPSPEC = ("dspark", "without confidence", "own shape and rope")


def deepspec(served: tuple[Path, Target], name: str, anchors: int) -> tuple[Any, DSparkDraft, Config]:
    """The authors' own class, from a checkout that LONGTRAIN_DEEPSPEC names, with the weights of a folder."""
    place = os.environ.get("LONGTRAIN_DEEPSPEC")
    if not place:
        pytest.skip("DeepSpec is no package: set LONGTRAIN_DEEPSPEC to a checkout of deepseek-ai/DeepSpec")
    sys.path.insert(0, place)
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
    from transformers import AutoConfig

    folder, target = served
    path = folder / f"deepspec-{name}"
    module, config = exported(path, "flat", CASES[name], target)
    theirs = AutoConfig.from_pretrained(path)
    theirs.num_anchors, theirs._attn_implementation = anchors, "sdpa"
    model = Qwen3DSparkModel(theirs).float().eval()
    lost = model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    assert not lost.unexpected_keys and set(lost.missing_keys) == {"embed_tokens.weight", "lm_head.weight"}
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.embed_weight)
        model.lm_head.weight.copy_(target.head_weight)
    return model, module, config


@torch.no_grad()
@pytest.mark.parametrize("name", OF_DEEPSPEC)
def test_deepspec_class(served: tuple[Path, Target], name: str) -> None:
    model, module, config = deepspec(served, name, len(ANCHORS))
    inputs = inputs_of(config, 11)
    mask = torch.zeros(1, TOKENS)
    mask[0, inputs["anchors"]] = 1
    mask[0, inputs["anchors"] + 1] = 1
    out = model(inputs["ids"][None], inputs["states"][None], mask)
    found = {"logits": out.draft_logits[0]}
    if out.confidence_pred is not None:
        found["confidence"] = out.confidence_pred[0]
    ours = our_blocks(module, config, served[1], inputs)
    del ours["hidden"]
    far = apart(ours, found)
    print(f"{name}: largest difference {far:.2e}")  # noqa: T201
    assert far < 3e-5 and float(found["logits"].abs().max()) > 1


@pytest.mark.parametrize("name", OF_DEEPSPEC)
def test_deepspec_loss_and_gradients(served: tuple[Path, Target], name: str) -> None:
    """Theirs is divided by the sum of weights, ours by that of one block's: the sums and gradients agree."""
    target = served[1]
    ids = torch.randint(97, (TOKENS,), generator=torch.Generator().manual_seed(5))
    mask = torch.arange(TOKENS) % 19 > 5
    anchors = int((mask[:-1] & mask[1:]).sum())
    model, module, config = deepspec(served, name, anchors)
    from deepspec.modeling.dspark.loss import _collect_local_terms

    batch = Batch(ids, (0, TOKENS), mask, seed=1, tokens_in_step=int(mask.sum()))
    objective = DSparkObjective(module, target, replace(config, anchor_every=1))
    weights = torch.exp(-torch.arange(config.block_size) / config.block_decay).sum()
    ours = objective(batch).total * weights
    ours.backward()
    request = OutputRequest("none", hidden=(*module.read, -1))
    with torch.no_grad():
        step = target.packed(ids, torch.arange(TOKENS), (0, TOKENS), request)
        states = torch.cat([step.hidden[layer] for layer in module.read], -1)
    out = model(ids[None], states[None], mask[None].float(), step.hidden[-1][None])
    terms, _ = _collect_local_terms(outputs=out, loss_decay_gamma=config.block_decay, l1_loss_alpha=0.9)
    shares = {"ce": config.ce_weight, "l1": config.l1_weight, "confidence": config.confidence_weight}
    theirs = sum(share * terms[f"{part}_loss_num"] for part, share in shares.items())
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    named = dict(model.named_parameters())
    for key, param in module.named_parameters():
        assert param.grad is not None and named[key].grad is not None, key
        torch.testing.assert_close(param.grad, named[key].grad, rtol=2e-3, atol=2e-5)
