"""longtrain: train, validate and ship the small learned modules that make long-context LLM inference fast."""

__version__ = "0.1.0"
