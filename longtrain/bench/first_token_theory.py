"""What systems that evict add to the first token by arithmetic, as methods and policies say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from longtrain import methods
from longtrain.bench.suites import Row
from longtrain.costs.hardware import Gpu
from longtrain.costs.method import PromptShape
from longtrain.methods import policies
from longtrain.systems import Entry
from longtrain.tables import of_rows


def theory(entry: Entry, prompt: PromptShape, gpu: Gpu) -> tuple[Mapping[str, float], str]:
    """What a system adds to the first token by arithmetic, and the figure that is to be measured."""
    if entry.method is not None:
        cost = methods.get(entry.method.name).cost
        if cost.first_token is not None:
            return cost.first_token(entry.config(), prompt, gpu), cost.as_built
    if entry.is_policy and entry.policy is not None:
        return policies.policy_class(entry.policy.name).first_token(prompt, gpu), "ms"
    return {}, "ms"


def line(entries: Sequence[Entry], prompt: PromptShape, gpu: Gpu) -> Row:
    """Milliseconds and TFLOP of a prefill, and what each system adds to it."""
    base = prompt.prefill
    found: Row = {
        "gpu": gpu.name,
        "prompt_tokens": prompt.tokens,
        "attention": "causal" if prompt.causal else "full",
        "forward_tflop": base.flops * 1e-12,
        "forward_ms": base.ms(gpu),
    }
    for entry in entries:
        figures, _ = theory(entry, prompt, gpu)
        found |= {f"{entry.called()}_{key}": value for key, value in figures.items()}
    return found


def theory_table(rows: Sequence[Row]) -> str:
    """A table for each shape and GPU."""
    done = [row for row in rows if "failed" not in row]
    found = []
    columns = {"prompt": "prompt_tokens", "attention": "attention"}
    for key in dict.fromkeys(key for row in done for key in row if key.endswith(("_tflop", "_ms", "_gb"))):
        words = key.replace("_tflop", " TFLOP").replace("_gb", " GB").replace("_", " ")
        added = key.endswith("_ms") and key != "forward_ms"
        columns[words.removesuffix(" ms") + " +" if added else words] = key
    for shape, draft, gpu in dict.fromkeys((row["shape"], row["draft_shape"], row["gpu"]) for row in done):
        own = [row for row in done if (row["shape"], row["gpu"]) == (shape, gpu)]
        found.append(f"{shape}, drafts of {draft}, {gpu}:\n\n{of_rows(own, columns)}")
    return "\n\n".join(found)
