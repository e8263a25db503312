"""Run by test_sglang.py where SGLang's files lie: `sglang_worker.py JOB.json RESULT.json`.

SGLang itself needs a GPU's libraries to be imported. So its sparsity framework is loaded alone: the package
`sglang.srt.mem_cache.sparsity` is the real one, `ForwardMode` is cut out of its real file, and what these two
take from the rest of SGLang is stood in for: two names of types, and the text of `--hisparse-config`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
from enum import IntEnum, auto
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

job = json.loads(Path(sys.argv[1]).read_text())
sys.path[:0] = [job["served"], job["head"]]
ROOT = Path(importlib.util.find_spec("sglang").origin).parent


def stand_in(name: str, folder: Path | None = None, **names: Any) -> None:
    """A module of this name, without its own code."""
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(names)
    if folder is not None:
        module.__path__ = [str(folder)]


def cut_out(file: Path, name: str) -> ast.ClassDef:
    """A class's own text."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


for package in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
    stand_in(package, ROOT.joinpath(*package.split(".")[1:]))
stand_in("sglang.srt.mem_cache.memory_pool", KVCache=object, ReqToTokenPool=object)
stand_in("sglang.srt.runtime_context", get_memory=lambda: SimpleNamespace(hisparse_config=job["config"]))

import specontext_sglang  # noqa: E402
from served import Served  # noqa: E402
from sglang.srt.mem_cache.sparsity import BaseSparseAlgorithm, create_sparse_coordinator  # noqa: E402

batch_file = ROOT / "srt" / "model_executor" / "forward_batch_info.py"
known: dict[str, Any] = {"IntEnum": IntEnum, "auto": auto}
exec(compile(ast.Module([cut_out(batch_file, "ForwardMode")], []), str(batch_file), "exec"), known)
fields = {
    node.target.id for node in cut_out(batch_file, "ForwardBatch").body if isinstance(node, ast.AnnAssign)
}

specontext_sglang.register()
served = Served(job["texts"], job["prompts"], job["page"], known["ForwardMode"])
served.layers = job["layers"]
coordinator = create_sparse_coordinator(torch.device("cpu"), served.pool, served.kv_pool, 0, served.layers)
algorithm = coordinator.algorithm
assert isinstance(algorithm, BaseSparseAlgorithm) and type(algorithm).__name__ == "SpeContextAlgorithm"
for name, method in inspect.getmembers(BaseSparseAlgorithm, inspect.isfunction):
    theirs, ours = (inspect.signature(one).parameters for one in (method, getattr(type(algorithm), name)))
    assert [*theirs] == [*ours], name
for row, prompt in zip(served.owner.tolist(), job["prompts"], strict=True):
    held = SimpleNamespace(holds_kv=True, req_pool_idx=row)
    coordinator.on_request_begin(SimpleNamespace(kv=held, origin_input_ids=[0] * prompt))


def metadata(batch: Any) -> Any:
    """What the FlashAttention backend prepares for a step: pages and lengths of whole texts."""
    starts = torch.arange(0, int(batch.seq_lens.max()), job["page"])
    lengths = batch.seq_lens.int()
    return SimpleNamespace(
        page_table=served.table[batch.req_pool_indices][:, starts] // job["page"],
        cache_seqlens_int32=lengths,
        cu_seqlens_k=torch.nn.functional.pad(lengths.cumsum(0).int(), (1, 0)),
        max_seq_len_k=int(lengths.max()),
    )


def begin(layer: int, batch: Any) -> list[list[int]]:
    """Positions that attention reads for each request, by the adapted metadata."""
    assert {*vars(batch)} <= fields
    if layer == 0:
        step["metadata"] = metadata(batch)
    query = torch.empty(len(batch.seq_lens), 4, 8)
    step["metadata"] = coordinator.attention_begin(
        query, None, None, SimpleNamespace(layer_id=layer), batch, step["metadata"]
    )
    read = step["metadata"]
    slots = (read.page_table[..., None].long() * job["page"] + torch.arange(job["page"])).flatten(1)
    counts = read.cache_seqlens_int32.tolist()
    return [
        [served.position[slot] for slot in row[:n].tolist()] for row, n in zip(slots, counts, strict=True)
    ]


def end(layer: int, batch: Any) -> None:
    """After attention."""
    coordinator.attention_end(None, SimpleNamespace(layer_id=layer), batch)


step: dict[str, Any] = {}
served.prefill(end)
steps = [served.decode(at, begin, end) for at in range(job["steps"])]
found = [[list(layers) for layers in zip(*one, strict=True)] for one in steps]
Path(sys.argv[2]).write_text(json.dumps({"read": found, "shared": served.shared}))
