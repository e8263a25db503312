"""vLLM on a CPU drafts with a LongSpec artifact what our engine drafts, from its own paged cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from environments import run
from test_vllm import VLLM

import longtrain.integrations
from longtrain.artifact import Artifact
from longtrain.data.packing.batch import Batch
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import TreeShape
from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.spec import SPEC
from tests.helpers import target_from_model
from tests.interop.recorder import Recorder

pytestmark = pytest.mark.slow
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 97, "max_position_embeddings": 512}
TOKENS, DRAFTED = 32, 4


def trained(target, config, texts):
    """A draft that knows some texts a little: a part of what it drafts is accepted."""
    torch.manual_seed(1)
    module = SPEC.build(config, target.info)
    objective = SPEC.objective(module, target, config)
    bounds = [0]
    for text in texts:
        bounds.append(bounds[-1] + len(text))
    learn = torch.ones(bounds[-1], dtype=torch.bool)
    learn[bounds[:-1]] = False
    ids, labels = torch.tensor([token for text in texts for token in text]), int(learn.sum())
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    for step in range(60):
        loss = objective(Batch(ids, tuple(bounds), learn, seed=step, tokens_in_step=labels))
        optimizer.zero_grad()
        (loss.total / labels).backward()
        optimizer.step()
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen3", {"kv_source_layer": 1, "final_norm": True, "window": 300})],
    ids=["llama", "qwen3, another layer, a window longer than the prompts"],
)
def test_it_drafts_what_our_engine_drafts(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Prompts read in chunks; alone and together; blocks that come from vLLM's prefix cache."""
    torch.manual_seed(0)
    shape = transformers.AutoConfig.for_model(family, **SHAPE, eos_token_id=0, initializer_range=0.3)
    model = transformers.AutoModelForCausalLM.from_config(shape).float().eval()
    model.save_pretrained(tmp_path / "target")
    target = target_from_model(model, name="served")
    gen = torch.Generator().manual_seed(5)
    prompts = [torch.randint(1, 97, (n,), generator=gen).tolist() for n in (40, 7, 150)]
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_eos": True}
    plain = Engine(target).generate(prompts, **options).tokens
    config = Config(**{"window": 12, **changes})
    texts = [prompt + new for prompt, new in zip(prompts, plain, strict=True)]
    draft = trained(target, config, texts)
    Artifact.from_module("longspec", config, module=draft, target=target).save(tmp_path / "draft")
    ours, cycles = [], 0
    for prompt in prompts:
        parts = SPEC.attach(draft, target, config, {})
        recorder = Recorder(parts.draft)
        engine = Engine(target, replace(parts, draft=recorder), capture=False)
        found = engine.generate([prompt], shape=TreeShape((1,) * DRAFTED), **options)
        ours.append({"tokens": found.tokens[0], "drafted": recorder.seen})
        cycles += len(recorder.seen)
    assert [one["tokens"] for one in ours] == plain and cycles < 0.8 * 3 * TOKENS  # paths of several tokens

    job = {
        "folder_of_proposer": str(Path(longtrain.integrations.__file__).parent),
        "target": str(tmp_path / "target"),
        "artifact": str(tmp_path / "draft"),
        "drafted": DRAFTED,
        "batched_tokens": 64,
        "new_tokens": TOKENS,
        "prompts": prompts,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    worker = Path(__file__).with_name("longspec_vllm_worker.py")
    run(VLLM.python(), worker, tmp_path / "job.json", tmp_path / "result.json", VLLM_CPU_KVCACHE_SPACE="1")
    theirs = json.loads((tmp_path / "result.json").read_text())
    for mine, other in zip(ours, theirs["alone"], strict=True):
        assert other["tokens"] == mine["tokens"]
        assert other["drafted"][: len(mine["drafted"])] == mine["drafted"]
    assert theirs["together"] == plain
    alone = [chain for one in theirs["alone"] for chain in one["drafted"]]
    assert theirs["drafted_together"] == sorted(alone)
