"""LookaheadKVPress in kvpress's own environment against an independent computation.

The slow tests make that environment once (in pytest's cache folder), or take the interpreter that
LONGTRAIN_KVPRESS_PYTHON names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, max_pool1d, silu

KVPRESS = "0.5.5"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
M, RANK, ALPHA, KERNEL = 5, 3, 12.0, 7
LENGTHS = (61, 40, 9)
SETTINGS: list[dict[str, Any]] = [{"budget": 8}, {"budget": 20}, {"compression_ratio": 0.75}]
PRESS = Path("longtrain") / "methods" / "lookaheadkv" / "press.py"
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture(scope="session")
def interpreter(pytestconfig: pytest.Config) -> Path:
    """A Python with kvpress: it needs an older transformers than longtrain."""
    if given := os.environ.get("LONGTRAIN_KVPRESS_PYTHON"):
        return Path(given)
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir(f"kvpress-{KVPRESS}")
    python = folder / "venv" / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder / "venv", with_pip=True, clear=True)
        torch_ = f"torch=={torch.__version__.split('+')[0]}"
        call(python, "-m", "pip", "install", "--quiet", torch_, f"kvpress=={KVPRESS}", limit_s=1200)
        (folder / "ready").touch()
    return python


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


def write_peft(folder: Path, model: Any) -> dict[str, Tensor]:
    """An artifact's PEFT folder with random soft tokens and LoRA; its tensors."""
    folder.mkdir(parents=True)
    lora: dict[str, Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        for name in LINEARS:
            part = "mlp" if hasattr(layer.mlp, name) else "self_attn"
            if i == len(model.model.layers) - 1 and name not in LINEARS[:3]:
                continue
            frozen = getattr(getattr(layer, part), name)
            stem = f"base_model.model.model.layers.{i}.{part}.{name}.lora_"
            lora[stem + "A.weight"] = torch.randn(RANK, frozen.in_features) * 0.2
            lora[stem + "B.weight"] = torch.randn(frozen.out_features, RANK) * 0.2
    soft = {"lookahead_embeddings": torch.randn(M, model.config.hidden_size)}
    save_file(lora, folder / "adapter_model.safetensors")
    save_file(soft, folder / "lookahead_embeddings.safetensors")
    adapter = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": [*LINEARS],
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    facts = {
        "n": M,
        "pool": "max",
        "kernel": KERNEL,
        "reduction": "mean",
        "base_model": "",
        "query_aware": True,
    }
    (folder / "longtrain_eviction.json").write_text(json.dumps(facts))
    return lora | soft


@torch.no_grad()
def expected(model: Any, tensors: dict[str, Tensor], prompt: list[int], n_kept: int) -> list:
    """Positions kept [layer][1][KV head]: prompt and soft tokens as one sequence in fp64, every matrix whole.

    Independent of the press and of longtrain: LoRA by a mask on rows, scores from the full attention matrix.
    """
    model, S = model.double(), len(prompt)
    x = torch.cat((model.model.embed_tokens(torch.tensor(prompt)), tensors["lookahead_embeddings"].double()))
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
            stem = f"base_model.model.model.layers.{i}.{part}.{name}.lora_"
            out = linear(x, frozen.weight, frozen.bias)
            if stem + "A.weight" not in tensors:
                return out
            A, B = (tensors[f"{stem}{side}.weight"].double() for side in "AB")
            return out + is_soft * (ALPHA / RANK) * (x @ A.T @ B.T)

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
        s = p[:, S:, :S].mean(1).view(G, H // G, S).mean(1)
        pooled = max_pool1d(s, KERNEL, stride=1, padding=KERNEL // 2)
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
    tensors = write_peft(folder / "artifact" / "peft", model)
    shutil.copy(root / PRESS, folder / "press.py")
    prompts = [torch.randint(0, 4096, (n,)).tolist() for n in LENGTHS]
    job: dict[str, Any] = {"folder": str(folder), "model": str(folder / "model"), "settings": SETTINGS}
    job |= {"artifact": str(folder / "artifact"), "prompts": prompts, "checks": ["selections"]}
    job["checks"] += ["outputs_unchanged", "all_fits", "reuse", "after_failure", "batch", "generated"]
    job["checks"] += ["two_questions", "wrappers", "refusals"]
    (folder / "job.json").write_text(json.dumps(job))
    worker = Path(__file__).with_name("press_worker.py")
    call(interpreter, worker, folder / "job.json", folder / "result.json")
    want = {
        (i, j): expected(model, tensors, prompt, min(len(prompt), kept_of(fields, len(prompt))))
        for i, prompt in enumerate(prompts)
        for j, fields in enumerate(SETTINGS)
    }
    return want, json.loads((folder / "result.json").read_text())


def kept_of(fields: dict[str, Any], length: int) -> int:
    return fields["budget"] if "budget" in fields else int(length * (1 - fields["compression_ratio"]))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_keeps_what_the_definition_says(ran: tuple[dict, dict]) -> None:
    want, got = ran
    for (i, j), kept in want.items():
        assert got["selections"][i][j] == kept, f"prompt of {LENGTHS[i]} tokens, {SETTINGS[j]}"
    assert want[0, 0] != want[0, 1]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "check",
    ["outputs_unchanged", "all_fits", "reuse", "after_failure", "batch", "generated", "two_questions"],
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
    "empty artifact": "ValueError: .*lacks adapter_config.json",
    "budget": "ValueError: budget=0; allowed: 1 or more",
    "kernel": "ValueError: kernel_size=4; allowed: odd",
    "ratio": "ValueError: compression_ratio=1.0; allowed",
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("case", REFUSED)
def test_refuses(ran: tuple[dict, dict], case: str) -> None:
    import re

    assert re.match(REFUSED[case], ran[1]["refusals"][case]), ran[1]["refusals"][case]


def test_import_of_the_method_leaves_the_press_alone() -> None:
    """kvpress is not among longtrain's dependencies."""
    code = "import sys, longtrain.methods.lookaheadkv as m; assert m.__name__ + '.press' not in sys.modules"
    call(sys.executable, "-c", code)
