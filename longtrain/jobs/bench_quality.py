"""`longtrain bench suite=quantspec_quality`: rows of a step beside single rows; `eval` measures the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from longtrain import files, provenance
from longtrain.artifact import Artifact
from longtrain.assets import asset_dir
from longtrain.decoding.roles import Parts
from longtrain.evaluation import row_invariance
from longtrain.evaluation.corpora import prefix_of
from longtrain.evaluation.suites.continuation import choose_points, held_out
from longtrain.evaluation.suites.quantspec_quality import ROWS, QualitySettings
from longtrain.evaluation.suites.shared import settings_of
from longtrain.jobs import eval as eval_job
from longtrain.jobs.setup import convert, load_target_from, plain
from longtrain.kernels.hierarchical.layout import BLOCK
from longtrain.systems import Builder, parse
from longtrain.tables import of_rows, say

STEP_TOKENS = 24
"""Tokens that are read row by row and in steps."""
COLUMNS = {
    "cache": "cache",
    "rows": "rows",
    "attention equal": "attention_equal",
    "layers equal": "layers_equal",
    "first that differs": "first_layer",
    "hidden difference": "hidden_difference",
    "logit difference": "logit_difference",
    "logit spacing": "logit_spacing",
    "same argmax": "same_argmax",
}


def run(cfg: DictConfig) -> None:
    """Measure steps of several rows if they are asked for, and hand the other sections over to `eval`.

    Raises:
        ConfigError: a key of the suite is wrong, or the target has no tokenizer.
        DataError: there is too little text.
    """
    asked = settings_of(QualitySettings, plain(cfg.suite))
    if ROWS in asked.sections:
        _rows(cfg, asked)
    if set(asked.sections) != {ROWS}:
        keys = plain(OmegaConf.load(asset_dir("conf") / "eval.yaml"))
        del keys["defaults"]
        with open_dict(cfg):
            merged = OmegaConf.merge(keys, cfg, {"job": "eval"})
        assert isinstance(merged, DictConfig)
        eval_job.run(merged)


def _rows(cfg: DictConfig, asked: QualitySettings) -> None:
    """Steps of several rows on the quantised cache and on the plain one."""
    target, seed = load_target_from(cfg), convert(cfg.seed, int, "seed")
    chosen = choose_points(
        held_out(target, asked.text or "bundled", asked.kinds or ()),
        longest=max(asked.lengths[-1], BLOCK + 1),
        count=1,
        margin=STEP_TOKENS,
        seed=seed,
    )
    (point,) = chosen.points
    length = max(asked.lengths[0] // BLOCK, 1) * BLOCK + 1  # then no block is quantised for a while
    prompt = point.prompt(min(length, point.end), prefix_of(target.tokenizer))
    text = point.document.ids_T[point.end :][:STEP_TOKENS].tolist()
    entry = parse({"cache": {"name": "int8", "split": asked.splits[0]}})
    artifacts: dict[str, Artifact] = {}
    (quantised,) = Builder(target, (), (), artifacts.__getitem__).of(entry)
    rows: list[dict[str, Any]] = []
    for cache, parts in (("quantised", quantised.parts), ("plain", Parts())):
        for row in row_invariance.measure(target, parts, prompt, text, counts=asked.row_counts):
            rows.append({"section": ROWS, "cache": cache, "context_tokens": len(prompt), **row})
    folder = Path(cfg.run_dir) / "bench"
    content = {"suite": "quantspec_quality", "settings": plain(cfg.suite), "rows": rows}
    content |= provenance.gather()
    table = "## Rows of a step beside the same rows one by one\n\n" + of_rows(rows, COLUMNS)
    name, text_of_table = "quantspec_quality", f"{table}\n".encode()
    files.write_files(folder, {f"{name}.json": files.as_json(content), f"{name}.md": text_of_table})
    provenance.write(folder, plain(cfg))
    say(table, f"wrote quantspec_quality.json and a table in {folder}")
