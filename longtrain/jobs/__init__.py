"""The jobs of the command line, one module each; each has an entry point `run(cfg)`."""

from __future__ import annotations

JOBS: dict[str, tuple[str, str]] = {
    "prepare": ("longtrain.jobs.prepare", "turn manifests or your own files into tokenised, packed data"),
    "answers": (
        "longtrain.jobs.answers",
        "have the target answer prompts from any data: conversations to train on",
    ),
    "train": ("longtrain.jobs.train", "train a module against a frozen target (also without any job word)"),
    "export": (
        "longtrain.jobs.export",
        "write the trained module as an artifact folder, or with format= as one that engines serve",
    ),
    "eval": (
        "longtrain.jobs.eval",
        "run a suite with a target, policies and artifacts: JSON, tables, plots",
    ),
    "list": (
        "longtrain.jobs.finished.listing",
        "list artifacts, training runs and evaluations, a line each",
    ),
    "inspect": (
        "longtrain.jobs.finished.inspect",
        "describe an artifact and verify its files, without its target",
    ),
    "generate": ("longtrain.jobs.generate", "stream text from a target, with or without an artifact"),
    "serve": (
        "longtrain.jobs.serving.serve",
        "answer the OpenAI API with a target, alone or with artifacts",
    ),
    "demo": (
        "longtrain.jobs.demo",
        "show drafting and eviction on the bundled target, in seconds; nothing is trained",
    ),
    "bench": ("longtrain.jobs.bench", "measure speed and peak memory on this machine"),
    "plan": ("longtrain.jobs.plan", "estimate memory, compute and time of a recipe, without loading weights"),
}
"""Job name -> (module with `run(cfg)`, one line of help)."""

NAMED = {"inspect": ("artifact", "FOLDER|hub:ORG/NAME ...")}
"""Jobs that accept positional words -> (the key that collects them, their name in help)."""

SHARED = ("train",)
"""Jobs that run on every rank; all other jobs run on rank 0 only."""

CONFIGURED = {
    "prepare": "{run_dir}/prepare/config.yaml",
    "answers": "{run_dir}/answers/config.yaml",
    "train": "{run_dir}/train/config.yaml",
    "eval": "{run_dir}/eval/{suite}/config.yaml",
}
"""Jobs that store their whole configuration in a file -> the path of that file."""

KEPT = {
    "prepare": "data that was prepared before is as it was, and answers that the target wrote are kept; the "
    "same command goes on",
    "answers": "finished answers are kept in {run_dir}/answers/rows; the same command goes on",
    "train": "the last checkpoint, if one was saved yet, is in {run_dir}/train/checkpoints; the same command "
    "goes on from it",
    "export": "artifacts in {home}/checkpoints are as they were; run the same command again",
    "eval": "finished examples are kept in {run_dir}/eval/{suite}; the same command goes on with the others",
    "list": "nothing was written",
    "inspect": "nothing was written",
    "generate": "nothing was written to disk",
    "serve": "nothing was written to disk",
    "demo": "nothing was written to disk",
    "bench": "what was measured so far is in {run_dir}/bench; the same command measures anew",
    "plan": "nothing was written; run the same command again",
}
"""Job -> message after Ctrl-C: what was kept, and how to continue."""
