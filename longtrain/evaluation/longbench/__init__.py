"""The 16 English tasks: prompts, truncation, generation lengths, official scores."""

from longtrain.evaluation.longbench.files import HUB, TEMPLATES, published, read_tasks, unlike_published
from longtrain.evaluation.longbench.tasks import (
    NAMES,
    SPECS,
    WHOLE,
    LongBenchSpec,
    TaskRun,
    load,
    task_score,
    title,
)

__all__ = [
    "HUB",
    "NAMES",
    "SPECS",
    "TEMPLATES",
    "WHOLE",
    "LongBenchSpec",
    "TaskRun",
    "load",
    "published",
    "read_tasks",
    "task_score",
    "title",
    "unlike_published",
]
