"""Run by test_kvpress.py in kvpress's own environment: `press_worker.py JOB.json RESULT.json`.

`lookaheadkv_kvpress.py` is imported from the job's folder, alone, as a user who copies it would.
RESULT.json holds what
each check of the job's list returned.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

job = json.loads(Path(sys.argv[1]).read_text())
sys.path.insert(0, job["folder"])

import kvpress  # noqa: E402
import transformers  # noqa: E402
from lookaheadkv_kvpress import LookaheadKVPress  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(0)
CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def press(**fields: Any) -> LookaheadKVPress:
    return LookaheadKVPress(**{"artifact": job["artifact"], **fields})


def ids_of(prompt: list[int]) -> Tensor:
    return torch.tensor([prompt])


def prefill(ids: Tensor, press: Any = None, model_: Any = None, **fields: Any) -> tuple[DynamicCache, Tensor]:
    """Cache and logits after a prompt."""
    model_, cache = model_ or model, DynamicCache()
    with torch.no_grad():
        if press is None:
            logits = model_(ids, past_key_values=cache, **fields).logits
        else:
            with press(model_):
                logits = model_(ids, past_key_values=cache, **fields).logits
    return cache, logits


def kept(cache: DynamicCache, whole: DynamicCache) -> list:
    """Positions [layer][sequence][KV head] of cached keys, found again in the cache that holds them all."""
    found = []
    for few, all_ in zip(cache.layers, whole.layers, strict=True):
        same = (few.keys[:, :, :, None] == all_.keys[:, :, None]).all(-1)  # [B, G, kept, S]
        assert (same.sum(-1) == 1).all(), "a cached key is not one of the prompt's"
        index = same.to(torch.uint8).argmax(-1)
        values = all_.values.gather(2, index[..., None].expand_as(few.values))
        assert torch.equal(values, few.values), "values were not moved with their keys"
        found.append(index.tolist())
    return found


@check
def selections() -> list:
    """Of each prompt and setting, what stays."""
    found = []
    for prompt in job["prompts"]:
        whole, _ = prefill(ids_of(prompt))
        found.append([kept(prefill(ids_of(prompt), press(**fields))[0], whole) for fields in job["settings"]])
    return found


@check
def outputs_unchanged() -> bool:
    one = press(budget=8)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    logits, seen = prefill(ids_of(job["prompts"][0]))[1], prefill(ids_of(job["prompts"][0]), one)[1]
    after = model.state_dict()
    assert set(after) == set(before) and all(torch.equal(after[name], before[name]) for name in before)
    return torch.equal(logits, seen)


@check
def all_fits() -> bool:
    """A budget above the prompt changes nothing at all."""
    ids = ids_of(job["prompts"][0])
    with torch.no_grad():
        plain = model.generate(ids, max_new_tokens=6, do_sample=False)
        with press(budget=10_000)(model):
            same = model.generate(ids, max_new_tokens=6, do_sample=False)
    return torch.equal(plain, same)


@check
def reuse() -> bool:
    """One press on several prompts, in one `with` and in several, as new ones."""
    prompts, one = [job["prompts"][i] for i in (0, 1, 0)], press(budget=8)
    fresh = [prefill(ids_of(p), press(budget=8))[0] for p in prompts]
    again = [prefill(ids_of(p), one)[0] for p in prompts]
    inside = []
    with one(model), torch.no_grad():
        for prompt in prompts:
            inside.append(DynamicCache())
            model(ids_of(prompt), past_key_values=inside[-1])
    return all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        for other in (again, inside)
        for x, y in zip(fresh, other, strict=True)
        for a, b in zip(x.layers, y.layers, strict=True)
    )


@check
def after_failure() -> bool:
    """A prompt that broke off between two layers leaves no trace."""
    one, ids = press(budget=8), ids_of(job["prompts"][0])
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        prefill(ids, one)
    except ZeroDivisionError:
        pass
    finally:
        hook.remove()
    a, b = prefill(ids, one)[0], prefill(ids, press(budget=8))[0]
    return all(torch.equal(x.keys, y.keys) for x, y in zip(a.layers, b.layers, strict=True))


@check
def batch() -> bool:
    """Two prompts of one length together, as each alone."""
    n = min(len(p) for p in job["prompts"][:2])
    ids = torch.tensor([p[:n] for p in job["prompts"][:2]])
    together = kept(prefill(ids, press(budget=8))[0], prefill(ids)[0])
    for b in range(2):
        alone = kept(prefill(ids[b : b + 1], press(budget=8))[0], prefill(ids[b : b + 1])[0])
        if [layer[b] for layer in together] != [layer[0] for layer in alone]:
            return False
    return True


@check
def generated() -> bool:
    """`generate` goes on at the prompt's own positions, on the rows kept."""
    ids, n_new = ids_of(job["prompts"][0]), 8
    with torch.no_grad(), press(budget=12)(model):
        out = model.generate(ids, max_new_tokens=n_new, do_sample=False, eos_token_id=None)
    cache, logits = prefill(ids, press(budget=12))
    token, outputs = logits[:, -1:].argmax(-1), []
    for i in range(n_new):
        outputs.append(int(token))
        with torch.no_grad():
            places = torch.tensor([[ids.shape[1] + i]])
            token = model(token, past_key_values=cache, position_ids=places).logits[:, -1:].argmax(-1)
    return out[0, ids.shape[1] :].tolist() == outputs


@check
def two_questions() -> bool:
    """The pipeline's answers to two questions are those to each alone: the answers were cut off."""
    pipe = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
    one, context = press(compression_ratio=0.5), "The ship left the harbour at dawn. " * 6
    asked = ["When did it leave?", "What left the harbour?"]
    both = pipe(context, questions=asked, press=one, max_new_tokens=6)["answers"]
    alone = [pipe(context, question=q, press=one, max_new_tokens=6)["answer"] for q in asked]
    return both == alone and len(both) == 2


@check
def asked_again() -> bool:
    """ChunkKVPress scores a prompt shorter than a chunk twice: it keeps what the press keeps alone."""
    ids = ids_of(job["prompts"][0])
    chunked = kvpress.ChunkKVPress(press(budget=8), chunk_length=10_000)
    whole, alone = prefill(ids)[0], prefill(ids, press(budget=8))[0]
    found, outputs = kept(prefill(ids, chunked)[0], whole), kept(alone, whole)
    return [[[sorted(head) for head in row] for row in layer] for layer in found] == outputs


@check
def wrappers() -> dict:
    """Rows that stay of each layer, over its KV heads, with a ratio and two budgets; each generates."""
    S, G = len(job["prompts"][0]), model.config.num_key_value_heads
    ids, found = ids_of(job["prompts"][0]), {}
    made = {
        "alone": lambda p: p,
        "AdaKVPress": lambda p: kvpress.AdaKVPress(p),
        "CriticalKVPress": lambda p: kvpress.CriticalKVPress(p),
        "CriticalAdaKVPress": lambda p: kvpress.CriticalAdaKVPress(p),
        "ChunkKVPress": lambda p: kvpress.ChunkKVPress(p, chunk_length=4),
        "ChunkKVPress of a short prompt": lambda p: kvpress.ChunkKVPress(p, chunk_length=10_000),
        "KeyRerotationPress": lambda p: kvpress.KeyRerotationPress(p),
        "MergingPress": lambda p: kvpress.MergingPress(p),
    }
    for name, wrap in made.items():
        rows = []
        for fields in ({"compression_ratio": 0.75}, {"budget": 12}, {"budget": S}):
            for layer in model.model.layers:
                layer.self_attn.masked_key_indices = None
            one = press(**fields)
            if name == "CriticalAdaKVPress":  # kvpress 0.5.5: it does not hand the model on
                one.post_init_from_model(model)
            wrapped = wrap(one)
            cache, _ = prefill(ids, wrapped)
            off = [layer.self_attn.masked_key_indices for layer in model.model.layers]
            rows.append(
                [
                    G * c.keys.shape[2] - (0 if o is None else len(o[0]))
                    for c, o in zip(cache.layers, off, strict=True)
                ]
            )
            with wrapped(model):
                model.generate(ids, max_new_tokens=3, do_sample=False)
        found[name] = rows
    dms = kvpress.DMSPress(press(), threshold=1e-3, sliding_window_size=4)
    prefill(ids, dms)
    found["DMSPress"] = [[len(dms.compression_ratios)]]
    return found


def refusal(run: Callable[[], Any]) -> str:
    """What a call said, after its error's kind."""
    try:
        run()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def decoded(one: Any) -> None:
    with torch.no_grad(), one(model):
        model.generate(ids_of(job["prompts"][0]), max_new_tokens=8, do_sample=False, eos_token_id=None)


def other_model(**changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(
        **{**transformers.AutoConfig.from_pretrained(job["model"]).to_dict(), **changes}
    )
    return AutoModelForCausalLM.from_config(config)


def tampered(name: str, change: Callable[[Path], None]) -> LookaheadKVPress:
    """A press on a copy of the artifact's files that were changed."""
    folder = Path(job["folder"]) / name
    shutil.copytree(Path(job["artifact"]) / "peft", folder)
    change(folder)
    return LookaheadKVPress(artifact=str(folder), budget=4)


def without_gate(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.0.mlp.gate_proj.lora_"
    save_file(
        {k: v for k, v in tensors.items() if not k.startswith(stem)}, folder / "adapter_model.safetensors"
    )


def with_window(folder: Path) -> None:
    path = folder / "longtrain_eviction.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "suffix_window": 32}))


def enter(one: Any, model_: Any) -> None:
    with one(model_):
        pass


@check
def refusals() -> dict:
    ids, S = ids_of(job["prompts"][0]), len(job["prompts"][0])
    ratio = {"compression_ratio": 0.5}
    layers = model.model.layers

    def backwards() -> None:
        one = press(budget=4)
        with one(model):
            pass
        one.score(layers[1].self_attn, *fake(S), None, {"cache_position": torch.arange(S)})

    def twice() -> None:
        one = press(budget=4)
        with one(model):
            model(ids, past_key_values=DynamicCache())
        for _ in range(2):
            one.score(layers[0].self_attn, *fake(S), None, {"cache_position": torch.arange(S)})
        one.score(layers[1].self_attn, *fake(S), None, {"cache_position": torch.arange(S)})
        one.score(layers[1].self_attn, *fake(S), None, {"cache_position": torch.arange(S)})

    def fake(n: int) -> tuple[Tensor, Tensor, Tensor]:
        c = model.config
        kv = torch.randn(1, c.num_key_value_heads, n, layers[0].self_attn.head_dim)
        return torch.randn(1, n, c.hidden_size), kv, kv.clone()

    def quantised() -> None:
        one = press(budget=4)
        with one(model):
            pass
        cache = object.__new__(transformers.QuantizedCache)
        seen = {"cache_position": torch.arange(S), "past_key_values": cache}
        one.score(layers[0].self_attn, *fake(S), None, seen)

    mask = torch.ones(2, S, dtype=torch.long)
    mask[1, :3] = 0
    cases: dict[str, Callable[[], Any]] = {
        "ChunkPress": lambda: prefill(ids, kvpress.ChunkPress(press(**ratio), chunk_length=8)),
        "BlockPress": lambda: prefill(ids, kvpress.BlockPress(press(**ratio), block_size=8)),
        "DecodingPress": lambda: decoded(
            kvpress.DecodingPress(press(), compression_interval=2, target_size=4)
        ),
        "DMSPress": lambda: decoded(kvpress.DMSPress(press(), threshold=0.1, decoding=True)),
        "after another": lambda: prefill(
            ids, kvpress.ComposedPress([kvpress.KnormPress(0.5), press(**ratio)])
        ),
        "out of order": backwards,
        "twice": twice,
        "not shown the model": lambda: prefill(ids, kvpress.CriticalAdaKVPress(press(**ratio))),
        "outside": lambda: press(budget=4).score(layers[0].self_attn, *fake(S), None, {}),
        "padded": lambda: prefill(ids.repeat(2, 1), press(budget=4), attention_mask=mask),
        "quantised": quantised,
        "sliding": lambda: enter(
            press(), other_model(model_type="mistral", sliding_window=8, layer_types=None)
        ),
        "family": lambda: enter(press(), other_model(model_type="gemma")),
        "another model": lambda: enter(press(), other_model(hidden_size=96)),
        "fewer layers": lambda: enter(press(), other_model(num_hidden_layers=2, layer_types=None)),
        "no artifact": lambda: enter(LookaheadKVPress(budget=4), model),
        "empty artifact": lambda: enter(LookaheadKVPress(artifact=job["folder"]), model),
        "no weights": lambda: enter(
            tampered("no_weights", lambda f: (f / "adapter_model.safetensors").unlink()), model
        ),
        "a weight missing": lambda: enter(tampered("no_gate", without_gate), model),
        "suffix window": lambda: enter(tampered("window", with_window), model),
        "budget": lambda: press(budget=0),
        "kernel": lambda: press(kernel_size=4),
        "ratio": lambda: press(compression_ratio=1.0),
    }
    return {name: refusal(run) for name, run in cases.items()}


if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    results = {name: CHECKS[name]() for name in job["checks"]}
    Path(sys.argv[2]).write_text(json.dumps(results))
