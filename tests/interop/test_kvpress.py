"""LookaheadKVPress in kvpress's own environment keeps what longtrain and an independent computation keep.

The slow tests make that environment once, or take the interpreter that LONGTRAIN_KVPRESS_PYTHON names.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, max_pool1d, silu

from longtrain.artifact.folder import Artifact
from longtrain.decoding.prefill import prefill
from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.modules import LookaheadKV
from longtrain.methods.lookaheadkv.spec import SPEC
from longtrain.targets.model import Target
from tests.helpers import target_from_model

SMALL: dict[str, Any] = {"n_lookahead": 5, "lora_rank": 3, "lora_alpha": 12.0}
CONFIGS = {
    "paper": Config(**SMALL),
    "max_of_few": Config(**SMALL, lora_targets="qv", reduction="max", pool_kernel=3),
    "no_lora": Config(**SMALL, lora_targets="none"),
}
LENGTHS = (61, 40, 9)
SETTINGS: list[dict[str, Any]] = [{"budget": 8}, {"budget": 20}, {"compression_ratio": 0.75}]
PRESS = Path("longtrain") / "integrations" / "lookaheadkv_kvpress.py"
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def call(*words: str | Path, limit_s: int = 280) -> None:
    """Run a program; a failed test with what it said if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr


def tiny(family: str) -> Any:
    """A random model with attention far from uniform, fp32."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 4096, "max_position_embeddings": 512}
    fields = {**sizes, "initializer_range": 0.3, "sliding_window": None, "use_sliding_window": False}
    if family == "llama":
        fields = {**sizes, "initializer_range": 0.3}
    config = transformers.AutoConfig.for_model(family, **fields)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def write_artifact(folder: Path, target: Target, config: Config) -> LookaheadKV:
    """An artifact with random soft tokens and LoRA; its module."""
    module = SPEC.build(config, target.info)
    assert isinstance(module, LookaheadKV)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.normal_(0, 1.0 if "embeddings" in name else 0.2)
    Artifact.from_module("lookaheadkv", config, module=module, target=target).save(folder)
    return module


class Spy:
    """An evictor that notes what another one keeps."""

    def __init__(self, evictor: Any) -> None:
        self.evictor, self.keep = evictor, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.evictor, name)

    def select(self, run: Any) -> Any:
        self.keep = self.evictor.select(run)
        return self.keep


def of_longtrain(
    artifact: Artifact, target: Target, prompts: list[list[int]], setting: dict[str, Any]
) -> list:
    """Positions kept [prompt][layer][1][KV head], the prompts of different lengths in one batch."""
    share = 1 - setting["compression_ratio"] if "compression_ratio" in setting else None
    parts = artifact.attach(target, budget_tokens=setting.get("budget"), budget_ratio=share)
    spy = Spy(parts.evictor)
    prefill(target, target.new_cache, prompts, max_new_tokens=1, nodes=1, evictor=spy)
    assert spy.keep is not None
    n_LBG, idx_LBGK = spy.keep.n_LBG, spy.keep.idx_LBGK
    L, B, G = n_LBG.shape
    return [
        [[[idx_LBGK[i, b, g, : n_LBG[i, b, g]].tolist() for g in range(G)]] for i in range(L)]
        for b in range(B)
    ]


@torch.no_grad()
def defined(model: Any, module: LookaheadKV, config: Config, prompt: list[int], n_kept: int) -> list:
    """Positions kept [layer][1][KV head]: prompt and soft tokens as one sequence in fp64, every matrix whole.

    Independent of the press and of longtrain: LoRA by a mask on rows, scores from the full attention matrix.
    """
    tensors, S = {name: tensor.double() for name, tensor in module.state_dict().items()}, len(prompt)
    scale, kernel = config.lora_alpha / config.lora_rank, config.pool_kernel
    x = torch.cat((model.model.embed_tokens(torch.tensor(prompt)), tensors["lookahead_embeddings"]))
    N = len(x)
    is_soft = (torch.arange(N) >= S).double()[:, None]
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    rope = model.model.rotary_emb
    angle = torch.arange(N).double()[:, None] * rope.inv_freq.double()
    cos, sin = (
        torch.cat((f(angle), f(angle)), -1)[:, None] * rope.attention_scaling for f in (torch.cos, torch.sin)
    )
    found = []
    for i, layer in enumerate(model.model.layers):

        def project(part: str, name: str, x: Tensor, i: int = i, layer: Any = layer) -> Tensor:
            frozen = getattr(getattr(layer, part), name)
            stem = f"layers.{i}.{part}.{name}.lora_"
            out = linear(x, frozen.weight, frozen.bias)
            if stem + "A.weight" not in tensors:
                return out
            A, B = (tensors[f"{stem}{side}.weight"] for side in "AB")
            return out + is_soft * scale * (x @ A.T @ B.T)

        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        q, k, v = (project("self_attn", f"{n}_proj", normed).view(N, -1, attention.head_dim) for n in "qkv")
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        half = attention.head_dim // 2
        q, k = (y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin for y in (q, k))
        H, G = q.shape[1], k.shape[1]
        k, v = k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)
        p = torch.einsum("nhd,mhd->hnm", q, k) * attention.head_dim**-0.5
        p = p.masked_fill(later, -torch.inf).softmax(-1)
        s = p[:, S:, :S].mean(1).view(G, H // G, S)
        s = s.mean(1) if config.reduction == "mean" else s.amax(1)
        pooled = max_pool1d(s, kernel, stride=1, padding=kernel // 2)
        ranked = [sorted(range(S), key=lambda j, row=row: (-row[j], j))[:n_kept] for row in pooled.tolist()]
        found.append([[sorted(row) for row in ranked]])
        x = x + project("self_attn", "o_proj", torch.einsum("hnm,mhd->nhd", p, v).flatten(1))
        normed = layer.post_attention_layernorm(x)
        x = x + project(
            "mlp", "down_proj", silu(project("mlp", "gate_proj", normed)) * project("mlp", "up_proj", normed)
        )
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def ran(
    family: str, interpreter: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict, dict]:
    """Expected selections of a family's model, and the results of every check in kvpress's environment."""
    torch.manual_seed(FAMILIES.index(family))
    folder = tmp_path_factory.mktemp(family)
    model = tiny(family)
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "bundled" / "tiny" / name, folder / "model" / name)
    shutil.copy(root / PRESS, folder / "lookaheadkv_kvpress.py")
    target, double = target_from_model(model), tiny(family).double()
    double.load_state_dict(model.state_dict())
    prompts = [torch.randint(0, 4096, (n,)).tolist() for n in LENGTHS]
    settings, by_longtrain, by_definition = [], [], []
    for name, config in CONFIGS.items():
        module = write_artifact(folder / name, target, config)
        for setting in SETTINGS:
            settings.append({"artifact": str(folder / name), **setting})
            by_longtrain.append(of_longtrain(Artifact.load(folder / name), target, prompts, setting))
            sizes = [min(len(prompt), kept_of(setting, len(prompt))) for prompt in prompts]
            by_definition.append(
                [defined(double, module, config, p, n) for p, n in zip(prompts, sizes, strict=True)]
            )
    job: dict[str, Any] = {"folder": str(folder), "model": str(folder / "model"), "settings": settings}
    job |= {"artifact": str(folder / "paper"), "prompts": prompts, "checks": ["selections"]}
    job["checks"] += ["outputs_unchanged", "all_fits", "reuse", "after_failure", "batch", "generated"]
    job["checks"] += ["two_questions", "asked_again", "wrappers", "refusals"]
    (folder / "job.json").write_text(json.dumps(job))
    worker = Path(__file__).with_name("press_worker.py")
    call(interpreter, worker, folder / "job.json", folder / "result.json")
    outputs = {"settings": settings, "longtrain": by_longtrain, "definition": by_definition}
    return outputs, json.loads((folder / "result.json").read_text())


def kept_of(fields: dict[str, Any], length: int) -> int:
    return fields["budget"] if "budget" in fields else int(length * (1 - fields["compression_ratio"]) + 1e-6)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("source", ["definition", "longtrain"])
def test_keeps_what_the_definition_and_longtrain_keep(ran: tuple[dict, dict], source: str) -> None:
    outputs, got = ran
    for k, setting in enumerate(outputs["settings"]):
        for i, length in enumerate(LENGTHS):
            assert got["selections"][i][k] == outputs[source][k][i], f"prompt of {length} tokens, {setting}"
    whole = [[list(range(LENGTHS[2]))] * 2]
    assert got["selections"][2][1] == [whole] * 3, "a prompt within the budget stays whole"
    few = [got["selections"][0][k] for k in range(0, len(outputs["settings"]), len(SETTINGS))]
    assert all(few.count(one) == 1 for one in few), "the artifacts are too alike to tell them apart"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "check",
    [
        "outputs_unchanged",
        "all_fits",
        "reuse",
        "after_failure",
        "batch",
        "generated",
        "two_questions",
        "asked_again",
    ],
)
def test_in_use(ran: tuple[dict, dict], check: str) -> None:
    assert ran[1][check] is True


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_in_wrappers(ran: tuple[dict, dict], family: str) -> None:
    S, G, L = LENGTHS[0], 2, 3
    rows = ran[1]["wrappers"]
    assert rows.pop("DMSPress") == [[L]]
    for name, (by_ratio, by_budget, all_fits) in rows.items():
        assert all_fits == [G * S] * L, name
        if name == "ChunkKVPress":  # whole chunks of 4
            assert set(by_ratio) <= {G * 12, G * 13, G * 16} and set(by_budget) <= {G * 8, G * 9, G * 12}
        else:
            assert by_ratio == [G * (S // 4)] * L, name
            assert by_budget == [G * 12] * L, name


REFUSED = {
    "ChunkPress": "ValueError: .*one whole prompt",
    "BlockPress": "ValueError: .*one whole prompt",
    "DecodingPress": "ValueError: .*one whole prompt",
    "DMSPress": "ValueError: .*one whole prompt",
    "after another": "ValueError: .*one whole prompt",
    "out of order": "RuntimeError: .*asked for layer 1 .* layer 0 was due",
    "twice": "RuntimeError: .*asked for layer 1 .* layer 2 on 61 tokens was due",
    "not shown the model": "RuntimeError: .*post_init_from_model",
    "outside": "RuntimeError: .*with press",
    "padded": "ValueError: .*batch of 2 is padded",
    "quantised": "ValueError: .*quantised",
    "sliding": "ValueError: .*sliding-window attention .window 8",
    "family": "ValueError: .*gemma.*allowed|ValueError: .*gemma.*another family",
    "another model": "ValueError: .*trained for another model",
    "fewer layers": "ValueError: .*the model has 2 layers",
    "no artifact": "ValueError: artifact=None",
    "empty artifact": "ValueError: .*lacks longtrain_eviction.json",
    "no weights": "ValueError: .*lacks adapter_model.safetensors;",
    "a weight missing": "ValueError: .*adapter weights lack gate_proj of layer 0",
    "suffix window": "ValueError: .*cannot use suffix_window=32",
    "budget": "ValueError: budget=0; allowed: 1 or more",
    "kernel": "ValueError: kernel_size=4; allowed: odd",
    "ratio": "ValueError: compression_ratio=1.0; allowed",
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("case", REFUSED)
def test_refuses(ran: tuple[dict, dict], case: str) -> None:
    assert re.match(REFUSED[case], ran[1]["refusals"][case]), ran[1]["refusals"][case]


def test_import_of_the_method_leaves_the_press_alone() -> None:
    """kvpress is not among longtrain's dependencies."""
    code = "import sys, longtrain.methods.lookaheadkv as m; assert m.__name__ + '.press' not in sys.modules"
    call(sys.executable, "-c", code)
