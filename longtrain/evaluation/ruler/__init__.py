"""The 13 synthetic tasks at any length for any tokenizer, generated as the official release does."""

from longtrain.evaluation.ruler.generate import Generator, RulerExample
from longtrain.evaluation.ruler.questions import DATASETS, Questions, read_hotpotqa, read_squad
from longtrain.evaluation.ruler.sizing import Framing
from longtrain.evaluation.ruler.sources import Haystack, Vocabulary, is_published, vocabulary
from longtrain.evaluation.ruler.tasks import METRICS, SEED, TASKS

__all__ = [
    "DATASETS",
    "METRICS",
    "SEED",
    "TASKS",
    "Framing",
    "Generator",
    "Haystack",
    "Questions",
    "RulerExample",
    "Vocabulary",
    "is_published",
    "read_hotpotqa",
    "read_squad",
    "vocabulary",
]
