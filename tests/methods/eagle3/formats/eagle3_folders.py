"""A small target's shape, drafts of it with weights as after training, and an exported folder to damage."""

from __future__ import annotations

import hashlib
import json

import torch
from safetensors.torch import load_file, save_file

from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.targets.shapes import SHAPES

SHAPE = {**SHAPES["llama_micro"], "num_hidden_layers": 6, "max_position_embeddings": 512}


def trained_draft(config, info, *, seed=1):
    """A draft whose every tensor has moved from its start."""
    gen = torch.Generator().manual_seed(seed)
    module = Eagle3Draft(config, info)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            fresh = torch.randn(tensor.shape, generator=gen)
            tensor.copy_(fresh * (0.15 if tensor.ndim == 2 else 0.2) + ("norm" in name))
        if config.draft_vocab_size:
            others = torch.randperm(info.vocab_size - 2, generator=gen)[: config.draft_vocab_size - 1] + 2
            module.draft_ids_K.copy_(torch.cat((torch.tensor([1]), others)).sort().values)
    return module.eval()


class Folder:
    """An exported folder that a test may damage."""

    def __init__(self, path):
        self.path = path

    @property
    def config(self):
        return json.loads((self.path / "config.json").read_text())

    @property
    def tensors(self):
        return load_file(self.path / "model.safetensors")

    def write(self, *, config=None, tensors=None):
        if config is not None:
            (self.path / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(tensors, self.path / "model.safetensors")

    def reseal(self, *, keys=False):
        """Make the record's checksums fit what was changed, and with `keys` its copy of the keys too."""
        path = self.path / "longtrain" / "record.json"
        record = json.loads(path.read_text())
        names = record["files"]
        record["files"] = {n: hashlib.sha256((self.path / n).read_bytes()).hexdigest() for n in names}
        record["config"] = self.config if keys else record["config"]
        path.write_text(json.dumps(record))
