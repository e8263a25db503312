"""The README.md of an exported folder: how each engine serves it."""

from __future__ import annotations

import json
from typing import Any

from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.formats.names import FLAT
from longtrain.targets.info import TargetInfo

Json = dict[str, Any]


def serving_card(form: str, name: str, config: Config, info: TargetInfo, *, drafted: int) -> str:
    """The text, with a command for each engine that reads the format.

    Args:
        form: the format.
        name: the folder's name.
        config: hyperparameters.
        info: the target; its name must be a Hub id or a name, no folder.
        drafted: tokens of a chain.
    """
    target = info.name or "TARGET"
    speculative: Json = {"method": "eagle3", "model": name, "num_speculative_tokens": drafted}
    vllm = f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'"
    window = f"It sees the last {config.window} tokens besides the current one. " if config.window else ""
    lines = [
        "---\ntags: [eagle3, speculative-decoding, longtrain]\nlibrary_name: "
        f"{'sglang' if form == FLAT else 'vllm'}\n---",
        f"# {name}\n\nAn EAGLE-3 draft for **{target}** ({info.n_layers} layers, hidden "
        f"{info.hidden_size}, vocabulary "
        f"{info.vocab_size}), trained with longtrain and written in the `{form}` format. {window}"
        "It works with that target only.",
        "## Serve it\n",
        f"vLLM (the window, where there is one, is in `config.json`):\n\n```sh\n{vllm}\n```",
    ]
    if form == FLAT:
        lines.append(_sglang(name, config, target, drafted))
    else:
        lines.append(
            "`vllm serve FOLDER` alone does the same: the target and the number of drafted tokens are in "
            "`config.json` (`speculators_config`). SGLang does not read this format; export `format=flat` "
            "for it."
        )
    lines += [
        "## Check it\n\n```sh\nlongtrain export --verify FOLDER\n```\n\n`longtrain/` holds fixed inputs "
        "and what the draft "
        "made of them; engines do not read it.",
    ]
    return "\n\n".join(lines) + "\n"


def _sglang(name: str, config: Config, target: str, drafted: int) -> str:
    words = [
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3",
        f"--speculative-draft-model-path {name} --speculative-num-steps {drafted}",
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {drafted + 1}",
    ]
    note = ""
    if config.window:
        words.append(f"--speculative-draft-window-size {config.window + 1}")
        note = (
            "\n\nWithout `--speculative-draft-window-size` SGLang gives the draft full attention, which "
            "it was "
            "not trained for: it ignores the window in `config.json`. The flag works with its Triton and "
            "FlashInfer "
            "attention."
        )
    return "SGLang:\n\n```sh\n" + " \\\n  ".join(words) + f"\n```{note}"
