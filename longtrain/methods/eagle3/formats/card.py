"""Writes the README.md of an exported folder, with the commands to serve it."""

from __future__ import annotations

from longtrain.methods.draft_folders import serving_card
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.formats.names import FLAT
from longtrain.targets.info import TargetInfo

SGLANG = """SGLang:

```sh
python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \\
  --speculative-draft-model-path {name} --speculative-num-steps {drafted} \\
  --speculative-eagle-topk 1 --speculative-num-draft-tokens {verified}{window}
```"""
SGLANG_WINDOW = """

Without `--speculative-draft-window-size` SGLang gives the draft full attention, which it was not trained
for: it ignores the window in `config.json`. The flag works with its Triton and FlashInfer attention."""


def serving_page(form: str, name: str, config: Config, info: TargetInfo, *, drafted: int) -> str:
    """Return the README, with a command for each engine that reads the format.

    Args:
        form: the format.
        name: the folder's name.
        config: hyperparameters.
        info: the target; its name must be a Hub id or a plain name, not a path.
        drafted: length of the drafted chain.
    """
    window, more = config.window, ""
    if form == FLAT:
        flag = f" \\\n  --speculative-draft-window-size {window + 1}" if window else ""
        target = info.name or "TARGET"
        more = SGLANG.format(target=target, name=name, drafted=drafted, verified=drafted + 1, window=flag)
        more += SGLANG_WINDOW if window else ""
    return serving_card(
        form,
        name,
        info,
        title="An EAGLE-3",
        library="sglang" if form == FLAT else "vllm",
        window=f"It sees the last {window} tokens besides the current one. " if window else "",
        drafted=drafted,
        more=more,
    )
