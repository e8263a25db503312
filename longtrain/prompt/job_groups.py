"""The configuration groups that each job reads, and an example command, for `longtrain JOB --help`."""

from __future__ import annotations

_TRAINED = ("target", "method", "data", "optim", "trainer", "features", "logger", "callbacks")
_DECODED = ("target", "method", "evict", "decode")
GROUPS: dict[str, tuple[str, ...]] = {
    "prepare": ("target", "data"),
    "answers": ("target", "data", "decode"),
    "train": _TRAINED,
    "export": ("target", "method", "features"),
    "eval": (*_DECODED, "suite"),
    "generate": _DECODED,
    "serve": _DECODED,
    "demo": _DECODED,
    "bench": (*_DECODED, "suite"),
    "plan": (*_TRAINED, "evict", "decode"),
    "list": (),
    "inspect": (),
}
"""Job -> the groups that it reads."""
EXAMPLES: dict[str, str] = {
    "prepare": "longtrain prepare target=tiny data=excerpt show=1",
    "answers": "longtrain answers target=tiny data=excerpt decode.max_new_tokens=32 prompts=2",
    "train": "longtrain train +recipe=quickstart trainer.max_steps=20",
    "export": "longtrain export +recipe=quickstart",
    "generate": 'longtrain generate target=tiny artifact=tiny_longspec prompt="It was a dark night"',
    "serve": "longtrain serve artifact=tiny_longspec",
    "demo": "longtrain demo",
    "plan": "longtrain plan method=longspec target.shape=llama31_8b data=text gpu=H100",
    "list": "longtrain list",
    "inspect": "longtrain inspect tiny_longspec",
}
"""Job -> an example command; jobs with suites have several, in `suite_help`."""
