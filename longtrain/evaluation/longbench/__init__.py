"""LongBench's 16 English tasks: prompts, truncation, generation lengths, official scores."""

from longtrain.evaluation.longbench.files import HUB
from longtrain.evaluation.longbench.results import Ran, Title, summarise, task_score, title
from longtrain.evaluation.longbench.tasks import NAMES, SPECS, Spec, load
from longtrain.evaluation.prompts import Encoded, encode

__all__ = [
    "HUB",
    "NAMES",
    "SPECS",
    "Encoded",
    "Ran",
    "Spec",
    "Title",
    "encode",
    "load",
    "summarise",
    "task_score",
    "title",
]
