"""RULER: 13 synthetic tasks at any length for any tokenizer, generated as the official release does."""

from longtrain.evaluation.ruler.generate import Example, Generator, generate
from longtrain.evaluation.ruler.haystack import Haystack
from longtrain.evaluation.ruler.questions import DATASETS, Questions, read_hotpotqa, read_squad
from longtrain.evaluation.ruler.sizing import Framing
from longtrain.evaluation.ruler.tasks import METRICS, TASKS
from longtrain.evaluation.ruler.vocabulary import Vocabulary, vocabulary

__all__ = [
    "DATASETS",
    "METRICS",
    "TASKS",
    "Example",
    "Framing",
    "Generator",
    "Haystack",
    "Questions",
    "Vocabulary",
    "generate",
    "read_hotpotqa",
    "read_squad",
    "vocabulary",
]
