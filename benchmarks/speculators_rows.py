"""Time and memory of a DSpark training step of `speculators` on long rows, with the target in the process.

    python benchmarks/speculators_rows.py FOLDER [--shape llama31_8b] [--lengths 32768 65536 131072] ...

`pip install speculators` brings the trainer that is measured; ours is measured by `longtrain bench
suite=training method=dspark` at the same shape. A step is what one GPU has to do for a row: the target's pass
(transformers, its flash attention, only the states that are read are kept), and forward, backward, clipping
and AdamW of speculators' DSpark class as its trainer calls it (fp32 weights, bf16 autocast, its own
compilation). Both have random weights. The draft is ours of the same bench: two layers, the first with a
window, five layers' states, a block of 7, all tokens of the vocabulary.

speculators trains as many blocks of a row as `--anchors` says, whatever its length; 0 stands for one in eight
tokens, which is what ours trains. A row that does not fit is reported as such. FOLDER gets the target's
embeddings and LM head, which speculators reads from files, and rows.json, written after each row.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from longtrain import provenance
from longtrain.methods.dspark.config import Config, layers_of
from longtrain.targets.shapes import SHAPES

OURS = Config()
WINDOW = 1023
"""Tokens that the first of the two layers sees."""


def main() -> None:
    """Measure all rows and write what each took."""
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = provenance.gather()
    found["command"] = "python " + " ".join(sys.argv)
    found["rows"] = []
    config = AutoConfig.for_model(**SHAPES[args.shape])
    with device:
        target = AutoModel.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    write_verifier(config, target, args.folder)
    for length in args.lengths:
        for anchors in args.anchors:
            row = {"sequence_tokens": length, "blocks": anchors or length // OURS.anchor_every}
            row |= measured(target, draft_of(config, args, device), args, **row)
            found["rows"].append(row)
            sys.stdout.write(f"{row}\n")
            (args.folder / "rows.json").write_text(json.dumps(found, indent=1))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder for the target's files and the result")
    parser.add_argument("--shape", default="llama31_8b", choices=sorted(SHAPES), help="the target's shape")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[32768, 65536, 131072], help="tokens of a row"
    )
    parser.add_argument(
        "--anchors", type=int, nargs="+", default=[3072], help="blocks of a row; 0: one in eight tokens"
    )
    parser.add_argument("--steps", type=int, default=2, help="steps of a row; the last one counts")
    parser.add_argument(
        "--their-loss",
        choices=("fused", "eager"),
        default="fused",
        help="loss of speculators: its kernels, which torch 2.11 refuses to compile, or plain torch",
    )
    return parser.parse_args()


def write_verifier(config: Any, target: nn.Module, folder: Path) -> None:
    """Write what speculators reads of a target: config, embeddings, last norm and LM head."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    embeddings = target.get_input_embeddings().weight.cpu()  # type: ignore[operator]
    weights = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": embeddings.clone(),
        "model.norm.weight": target.norm.weight.cpu(),  # type: ignore[union-attr]
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def draft_of(config: Any, args: argparse.Namespace, device: torch.device) -> Any:
    """Build speculators' draft by its trainer's own function, with new weights."""
    from speculators.models.dspark import DSparkDraftModel

    layers = AutoConfig.for_model(
        "qwen3",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=max(args.lengths),
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        use_sliding_window=True,  # without it the config drops the window
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    )
    with device:
        return DSparkDraftModel.from_training_args(
            layers,
            verifier_name_or_path=str(args.folder),
            draft_vocab_size=config.vocab_size,
            block_size=OURS.block_size,
            target_layer_ids=[one + 1 for one in layers_of(OURS, config.num_hidden_layers)],
            mask_token_id=0,
            markov_rank=OURS.markov_rank,
            draft_attn_impl="simple_flex_attention" if device.type == "cuda" else "eager",  # no CPU gradient
        ).to(device)


def measured(
    target: nn.Module, draft: Any, args: argparse.Namespace, *, sequence_tokens: int, blocks: int
) -> dict[str, Any]:
    """Return `step_s`, `target_s`, `peak_gib` and `tokens_per_s` of a row's last step, or the `error`."""
    device = next(draft.parameters()).device
    words = {"loss_fn": '{"ce": 0.1, "tv": 0.9}', "loss_implementation": args.their_loss}
    settings, _ = draft.get_trainer_kwargs(**words, max_anchors=blocks)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-4)
    draw = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    try:
        for _ in range(args.steps):
            ids_1T = torch.randint(draft.verifier_vocab_size, (1, sequence_tokens), generator=draw).to(device)
            start = now(device)
            read_1TF, last_1TE = states(target, ids_1T, draft.target_layer_ids)
            middle = now(device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                _, loss, _ = draft(
                    hidden_states=read_1TF,
                    input_ids=ids_1T,
                    loss_mask=torch.ones_like(ids_1T),
                    verifier_last_hidden_states=last_1TE,
                    document_ids=torch.zeros_like(ids_1T),
                    **settings,
                )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            end = now(device)
            found = {"step_s": end - start, "target_s": middle - start, "loss": float(loss)}
            found["tokens_per_s"] = sequence_tokens / found["step_s"]
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    except torch.OutOfMemoryError as error:
        found = {"error": str(error).splitlines()[0]}
    del draft, optimizer
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found


def states(target: nn.Module, ids_1T: Tensor, layers: list[int]) -> tuple[Tensor, Tensor]:
    """Run the target and return the states that the draft reads.

    Args:
        target: the target without its LM head.
        ids_1T: token ids of a row.
        layers: layers in speculators' numbers: state i enters layer i.

    Returns:
        Those states beside each other [1, T, layers x hidden size], and the last one before the final norm.
    """
    kept: dict[int, Tensor] = {}
    blocks: Any = target.layers
    wanted = [*(one - 1 for one in layers), len(blocks) - 1]

    def keeping(index: int) -> Any:
        def hook(_module: nn.Module, _given: Any, out: Any) -> None:
            kept[index] = out[0] if isinstance(out, tuple) else out

        return hook

    hooks = [blocks[index].register_forward_hook(keeping(index)) for index in set(wanted)]
    try:
        with torch.no_grad():
            target(ids_1T, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([kept[one] for one in wanted[:-1]], -1), kept[wanted[-1]]


def now(device: torch.device) -> float:
    """Return the time once the device has finished, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
