"""The speculators package's own class gives our logits for our folders, for every norm flag and window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import Environment, run
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtrain.files import write_files
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.formats import FORMATS
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.eagle3.recursion import recursion, rows_back
from longtrain.methods.rope import rotary_of
from longtrain.targets.model import Target
from tests.helpers import target_from_model

SPECULATORS = Environment(
    "speculators-0.9.0",
    needs=(
        *("torch==2.13.0+cpu", "transformers==5.19.0", "aiohttp", "click", "datasets>=4,<=5.1", "httpx"),
        *("huggingface-hub", "loguru<=0.7.3", "numpy", "openai>=2", "protobuf", "psutil", "pydantic>=2"),
        *("pydantic-settings", "rich", "safetensors", "tqdm", "typer"),
    ),
    alone=("speculators==0.9.0", "hs-connectors==0.9.0"),
)
"""Without torchaudio and torchvision, which its metadata asks for and its drafts do not need."""

SHAPE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 6, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROWS, DEPTHS = 128, 4  # their attention on a CPU takes whole blocks of 128
WINDOWS = {"window of 8": {"window": 7, "depths": 4}, "window of 5": {"window": 4, "depths": 3}}
CASES: dict[str, dict[str, Any]] = {
    f"fc={fc} out={out} residual={residual}": {
        **({fc: True} if fc else {}),
        "norm_output": out,
        "norm_before_residual": residual,
    }
    for fc in ("", "fc_norm", "norm_before_fc")
    for out in (False, True)
    for residual in (False, True)
}
CASES |= {
    "two levels": {"layers": [0, 4]},
    "whole vocabulary": {"draft_vocab_size": 0},
    "heads of another size": {"head_dim": 24, "n_heads": 2, "n_kv_heads": 1},
    "biases": {"attention_bias": True},
    "norms on heads": {"qk_norm": True},
    "own rope": {"rope": LLAMA3},
    "own embeddings": {"own_embeddings": True},
    **{name: {**fields, "fc_norm": True, "norm_output": True} for name, fields in WINDOWS.items()},
}


def draft(config: Config, target: Target) -> Eagle3Draft:
    """A draft whose every tensor matters."""
    gen = torch.Generator().manual_seed(3)
    module = Eagle3Draft(config, target.info)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            fresh = torch.randn(tensor.shape, generator=gen)
            tensor.copy_(fresh * (0.12 if tensor.ndim == 2 else 0.2) + ("norm" in name))
        if config.draft_vocab_size:
            some = torch.randperm(96, generator=gen)[: config.draft_vocab_size - 1] + 1
            module.draft_ids_K.copy_(torch.cat((torch.tensor([0]), some)).sort().values)
    return module.eval()


@torch.no_grad()
def our_logits(
    module: Eagle3Draft, config: Config, target: Target, inputs: dict[str, Tensor], back: Any
) -> Tensor:
    """[DEPTHS, rows, draft's vocabulary]: chains from every row that has tokens for all steps."""
    ids, rows = inputs["ids"], ROWS - DEPTHS + 1
    table = (
        target.model.model.embed_tokens.weight if module.embed_tokens is None else module.embed_tokens.weight
    )
    later = torch.stack([table[ids[depth : rows + depth]] for depth in range(1, DEPTHS)])
    feature = module.feature(inputs["states"][:rows].chunk(len(module.layers), -1))
    made = recursion(
        module,
        feature,
        (table[ids[:rows]], later),
        rope=rotary_of(config, target.info),
        pos_T=torch.arange(rows),
        back_K=back,
    )
    return made.logits_KRV


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Logits of their class for every case, and what ours are made of."""
    import transformers

    folder = tmp_path_factory.mktemp("speculators")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SHAPE, eos_token_id=0, initializer_range=0.3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder / "target")
    target = target_from_model(model, name=str(folder / "target"))
    made, job = {}, {"depths": DEPTHS, "cases": {}}
    for index, (name, fields) in enumerate(CASES.items()):
        config = Config(**{"layers": [1, 2, 4], "draft_vocab_size": 50, **fields})
        module, path = draft(config, target), folder / str(index)
        write_files(
            path, FORMATS.write("speculators", module.state_dict(), config, target, {"step": 1}, "draft")
        )
        gen = torch.Generator().manual_seed(index)
        inputs = {
            "states": torch.randn(ROWS, 48 * len(module.layers), generator=gen),
            "ids": torch.randint(97, (ROWS,), generator=gen),
        }
        save_file(inputs, folder / f"{index}.safetensors")
        job["cases"][name] = {"folder": str(path), "inputs": str(folder / f"{index}.safetensors")}
        made[name] = (module, config, target, inputs)
    (folder / "job.json").write_text(json.dumps(job))
    worker = Path(__file__).with_name("speculators_worker.py")
    run(SPECULATORS.python(), worker, folder / "job.json", folder / "result", TORCHDYNAMO_DISABLE="1")
    return load_file(folder / "result"), made


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_their_class_gives_our_logits(ran: tuple[dict[str, Tensor], dict[str, Any]], name: str) -> None:
    theirs, made = ran[0][name][:, : ROWS - DEPTHS + 1], ran[1][name]
    window = made[1].window
    still = (window,) * DEPTHS if window else None
    ours = our_logits(*made, still)
    difference = (ours - theirs).abs().amax(dim=(1, 2))
    print(f"{name}: largest logit difference over {DEPTHS} steps {float(difference.max()):.2e}")  # noqa: T201
    assert float(theirs.abs().max()) > 1 and float(difference.max()) < 3e-5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", WINDOWS)
def test_their_training_mask_does_not_move_with_the_step(
    ran: tuple[dict[str, Tensor], dict[str, Any]], name: str
) -> None:
    """Engines move the window with the chain: after the first step their trainer sees more than is served."""
    theirs, made = ran[0][name][:, : ROWS - DEPTHS + 1], ran[1][name]
    served = our_logits(*made, rows_back(made[1], DEPTHS))
    apart = (served - theirs).abs().amax(dim=(1, 2))
    assert float(apart[0]) < 1e-4 and float(apart[1:].min()) > 1e-2
