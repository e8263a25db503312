"""Writes the README.md of an exported folder, with the commands to serve it."""

from __future__ import annotations

import json

from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.formats.names import FLAT
from longtrain.targets.info import TargetInfo

CARD = """---
tags: [eagle3, speculative-decoding, longtrain]
library_name: {library}
---

# {name}

An EAGLE-3 draft for **{target}** ({shape}), trained with longtrain and written in the `{form}` format. \
{window}It works with that target only.

## Serve it

vLLM (the window, where there is one, is in `config.json`):

```sh
vllm serve {target} --speculative-config '{speculative}'
```

{more}

## Check it

```sh
longtrain export --verify FOLDER
```

`longtrain/` holds fixed inputs and what the draft made of them; engines do not read it.
"""
SPECULATORS_MORE = """`vllm serve FOLDER` alone does the same: the target and the number of drafted tokens
are in `config.json` (`speculators_config`). SGLang does not read this format; export `format=flat` for it."""
SGLANG = """SGLang:

```sh
python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \\
  --speculative-draft-model-path {name} --speculative-num-steps {drafted} \\
  --speculative-eagle-topk 1 --speculative-num-draft-tokens {verified}{window}
```"""
SGLANG_WINDOW = """

Without `--speculative-draft-window-size` SGLang gives the draft full attention, which it was not trained
for: it ignores the window in `config.json`. The flag works with its Triton and FlashInfer attention."""


def serving_card(form: str, name: str, config: Config, info: TargetInfo, *, drafted: int) -> str:
    """Return the README, with a command for each engine that reads the format.

    Args:
        form: the format.
        name: the folder's name.
        config: hyperparameters.
        info: the target; its name must be a Hub id or a plain name, not a path.
        drafted: length of the drafted chain.
    """
    target, window = info.name or "TARGET", config.window
    more = SPECULATORS_MORE
    if form == FLAT:
        flag = f" \\\n  --speculative-draft-window-size {window + 1}" if window else ""
        more = SGLANG.format(target=target, name=name, drafted=drafted, verified=drafted + 1, window=flag)
        more += SGLANG_WINDOW if window else ""
    return CARD.format(
        library="sglang" if form == FLAT else "vllm",
        name=name,
        target=target,
        shape=f"{info.n_layers} layers, hidden {info.hidden_size}, vocabulary {info.vocab_size}",
        form=form,
        window=f"It sees the last {window} tokens besides the current one. " if window else "",
        speculative=json.dumps({"method": "eagle3", "model": name, "num_speculative_tokens": drafted}),
        more=more,
    )
