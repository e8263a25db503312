"""Hidden states in the files of vLLM's connector, written as that code writes them, from a target of ours."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from longtrain.targets.step import OutputRequest


def states_of(target, ids, layer_ids):
    """The states [T, L, E] that vLLM stacks for these ids: 0: the embeddings, k: what layer k - 1 gives.

    Its models add a state as the loop over layers passes it, so the order asked for does not matter.
    """
    ids_T = torch.tensor(ids)
    hidden = tuple(sorted({one - 1 for one in layer_ids} - {-1}))
    step = target.packed(ids_T, torch.arange(len(ids)), (0, len(ids)), OutputRequest("none", hidden=hidden))
    found = [target.embed(ids_T) if one == 0 else step.hidden[one - 1] for one in sorted({*layer_ids})]
    return torch.stack(found, 1)


def write_states(folder, target, documents, layer_ids, *, name="cmpl-{}-0", dtype=None, **more):
    """Write each document's file and the unlocked lock that the connector leaves; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, ids in enumerate(documents):
        states = states_of(target, ids, layer_ids).to(dtype or target.dtype).contiguous()
        file = folder / f"{name.format(number)}.safetensors"
        save_file({"hidden_states": states, "token_ids": torch.tensor(ids), **more}, file)
        (folder / f"{file.name}.lock").touch()
        files.append(file)
    return files
