"""Writes the README.md of an exported folder, with the commands to serve it."""

from __future__ import annotations

from longtrain.methods.draft_folders import serving_card
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.formats.names import DSPARK, FLAT
from longtrain.methods.dspark.formats.write import draft_of_heads
from longtrain.targets.info import TargetInfo

SGLANG = """SGLang:

```sh
python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} \\
  --speculative-draft-model-path {name} --speculative-num-draft-tokens {verified}
```"""


def serving_page(form: str, name: str, config: Config, info: TargetInfo) -> str:
    """Return the README, with a command for each engine that reads the format."""
    draft, drafted = draft_of_heads(config), config.block_size
    sizes = [one for one in config.layer_windows if one is not None]
    some = f"{len(sizes)} of its {config.n_layers} layers" if sizes else ""
    seen = f"{some} see {sizes[0]} tokens before it. " if sizes else ""
    algorithm, target = "DSPARK" if draft == DSPARK else "DFLASH", info.name or "TARGET"
    more = SGLANG.format(target=target, name=name, algorithm=algorithm, verified=drafted + 1)
    return serving_card(
        form,
        name,
        info,
        title="A DSpark" if draft == DSPARK else "A DFlash",
        library="vllm",
        window=f"It drafts {drafted} tokens in one pass. {seen}",
        drafted=drafted,
        more=more if form == FLAT else "",
    )
