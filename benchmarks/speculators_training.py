"""Tokens a second of EAGLE-3 training beside the trainer of `speculators`, both from the same stored states.

    python benchmarks/speculators_training.py TARGET FOLDER [--tokens 8192] [--samples 32] [--steps 96] ...

TARGET is a folder of a Llama or Qwen model with its tokenizer; `pip install speculators` brings the other
trainer. The script writes FOLDER/states in speculators' format (random token ids, the target's own states),
starts both trainers by their own commands with the same draft (one layer of the target's shape, full
attention, the same vocabulary and depths, KL, AdamW, bf16 autocast), and writes FOLDER/comparison.json. Each
step reads one sequence. Time is taken between two optimiser steps after a synchronisation of the device, by
a hook of torch, so both are measured alike. A trainer's first steps compile and are left out. All steps of
speculators are of one epoch, since it validates after each.
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from longtrain import provenance
from longtrain.methods.feature_layers import feature_layers

TRAIN_SHARE = 0.9
"""Share of the sequences that speculators trains on; it refuses 1.0."""


def main() -> None:
    """Write the states, run both trainers, and print what each took."""
    if sys.argv[1:2] == ["--timed"]:
        first, last = (int(word) for word in sys.argv[3:5])
        timed(Path(sys.argv[2]), first, last, sys.argv[5], sys.argv[6:])
        return
    args = arguments()
    layers = write_states(args)
    commands = {"longtrain": longtrain(args, layers), "speculators": speculators(args, layers)}
    found: dict[str, Any] = provenance.gather()
    if "speculators" in args.only:
        found["versions"]["speculators"] = metadata.version("speculators")
    for name in args.only:
        module, words = commands[name]
        out = args.folder / f"{name}.json"
        half = [str(args.steps // 2), str(args.steps)]  # the second half is timed
        head = [sys.executable, __file__, "--timed", str(out), *half, module]
        subprocess.run([*head, *words], check=True)
        timing = json.loads(out.read_text())
        rate = timing["steps"] * args.tokens / timing["seconds"]
        found[name] = {
            "command": f"python -m {module} " + " ".join(words),
            "tokens_per_s": rate,
            **timing,
        }
        sys.stdout.write(f"{name}: {rate:,.0f} tokens/s, peak {timing['peak_gib'] or 0:.2f} GiB\n")
    if len(args.only) == len(commands):
        found["ratio"] = found["longtrain"]["tokens_per_s"] / found["speculators"]["tokens_per_s"]
        sys.stdout.write(f"longtrain / speculators: {found['ratio']:.2f}\n")
    (args.folder / "comparison.json").write_text(json.dumps(found, indent=1))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path, help="folder of the target")
    parser.add_argument("folder", type=Path, help="folder for states, runs and results")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--samples", type=int, default=32, help="different sequences")
    parser.add_argument("--steps", type=int, default=96, help="optimiser steps; the second half is timed")
    parser.add_argument("--depths", type=int, default=5, help="passes of the draft")
    parser.add_argument(
        "--draft-vocab-size", type=int, default=16384, help="tokens of the draft's vocabulary"
    )
    parser.add_argument(
        "--their-loss",
        choices=("fused", "eager"),
        default="fused",
        help="loss of speculators: its kernels, which torch 2.11 refuses to compile, or plain torch",
    )
    names = ("longtrain", "speculators")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), help="trainers that run")
    return parser.parse_args()


def write_states(args: argparse.Namespace) -> list[int]:
    """Write token ids and hidden states as speculators stores them; return the layers besides the last one.

    The target's states at layer i here are outputs of the layer with 0-based index i.
    """
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    model.to(device)
    layers = list(feature_layers(model.config.num_hidden_layers))
    data, states = args.folder / "states", args.folder / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    (data / "hidden_states").mkdir(parents=True, exist_ok=True)
    rows = []
    draw = torch.Generator().manual_seed(0)
    for i in range(args.samples):
        ids_T = torch.randint(model.config.vocab_size, (args.tokens,), generator=draw)
        with torch.no_grad():
            hidden = model.model(ids_T[None].to(device), output_hidden_states=True).hidden_states
        # hidden[i + 1] is the output of layer i; the last one is after the final norm
        hidden_TLE = torch.stack([hidden[one + 1][0] for one in (*layers, -2)], 1)
        save_file(
            {"token_ids": ids_T, "hidden_states": hidden_TLE.cpu().contiguous()},
            states / f"hs_{i}.safetensors",
        )
        row = {"input_ids": ids_T.tolist(), "loss_mask": [1] * args.tokens}
        rows.append({**row, "seq_len": args.tokens})
    # as many of the training share as there are steps; further ones are links to the same files
    repeated = [i % args.samples for i in range(math.ceil(args.steps / TRAIN_SHARE) + 1)]
    Dataset.from_list([rows[i] for i in repeated]).with_format("torch").save_to_disk(data)
    for place, i in enumerate(repeated):
        link = data / f"hidden_states/hs_{place}.safetensors"
        link.unlink(missing_ok=True)
        link.hardlink_to(states / f"hs_{i}.safetensors")
    kept = [json.dumps({key: row[key] for key in ("input_ids", "loss_mask")}) for row in rows]
    (args.folder / "tokens.jsonl").write_text("\n".join(kept) + "\n")
    counts = {token: model.config.vocab_size - token for token in range(model.config.vocab_size)}
    torch.save(counts, data / "token_freq.pt")
    return layers


def longtrain(args: argparse.Namespace, layers: list[int]) -> tuple[str, list[str]]:
    """Return the module and the words of our command: the states are taken in, then read alone."""
    stage = f"fraction: 1.0, sequence_tokens: {args.tokens}, doc_tokens: {args.tokens}, recut: false"
    common = [
        "train",
        "target=local",
        f"target.path={args.target}",
        f"home={args.folder}/longtrain",
        "name=eagle3",
        "method=eagle3",
        "data=text",
        "method.objective=kl",
        f"method.layers={layers}",
        f"method.depths={args.depths}",
        f"method.draft_vocab_size={args.draft_vocab_size}",
        f"method.chunk_tokens={args.tokens}",
        f"data.sources=[{{tokenised: {args.folder}/tokens.jsonl, kind: text}}]",
        "data.val_fraction=0",
        "data.val_sequences=0",
        f"data.max_doc_tokens={args.tokens}",
        f"data.stages=[{{{stage}}}]",
        "trainer.accumulate_grad_batches=1",
        "trainer.val_every=0",
    ]
    fill = [*common, "features=fill", f"features.dump={args.folder}/hidden_states"]
    fill += [f"features.dump_layers={layers}", "trainer.max_steps=1", "resume=never"]
    subprocess.run([sys.executable, "-m", "longtrain", *fill], check=True)
    words = [*common, "features=offline", f"trainer.max_steps={args.steps}", "resume=never"]
    return "longtrain", words


def speculators(args: argparse.Namespace, layers: list[int]) -> tuple[str, list[str]]:
    """Return the module and the words of the command of speculators."""
    words = {
        "verifier-name-or-path": args.target,
        "data-path": args.folder / "states",
        "save-path": args.folder / "speculators",
        "speculator-type": "eagle3",
        "total-seq-len": args.tokens,
        "ttt-steps": args.depths,
        "draft-vocab-size": args.draft_vocab_size,
        "max-steps": args.steps,
        "log-freq": 10 * args.steps,  # its logged steps synchronise with the device
        "train-data-ratio": TRAIN_SHARE,
        "loss-fn": "kl_div",
        "loss-implementation": args.their_loss,
        "optimizer": "adamw",
        "epochs": 1,
        "checkpoint-freq": 1,
        "lr": 1e-4,
        "on-missing": "raise",
        "mask-token-id": 0,
        "full-attention-indices": 0,
    }
    flat = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    return "speculators.train", [*flat, "--target-layer-ids", *(str(one + 1) for one in layers)]


def timed(out: Path, first: int, last: int, module: str, words: list[str]) -> None:
    """Run a module's command, and write the time between two of its optimiser steps.

    Args:
        out: JSON file: `seconds`, `steps`, `peak_gib`.
        first: number of the step after whose end time counts; the first one is 1.
        last: number of the step at whose end it stops.
        module: the module.
        words: its words.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    ends: dict[int, float] = {}
    count = 0

    def stepped(*_: Any) -> None:
        nonlocal count
        count += 1
        if count in (first, last):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends[count] = time.perf_counter()

    register_optimizer_step_post_hook(stepped)
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    result = {"seconds": ends[last] - ends[first], "steps": last - first, "peak_gib": peak}
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
