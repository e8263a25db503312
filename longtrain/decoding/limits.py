"""Limits of a call of the engine, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from longtrain.decoding.roles import Draft, TokenTree, TreeShape
from longtrain.errors import ConfigError, DataError, refusal
from longtrain.log import get_logger
from longtrain.targets.info import TargetInfo

log = get_logger(__name__)
_told: WeakSet[object] = WeakSet()
"""Drafts of which a line has said that they cannot gain."""


@dataclass(frozen=True)
class Limits:
    """Upper bounds for one call of `Engine.generate`, whose cache is allocated for the requested sizes.

    Args:
        batch: sequences.
        tokens: prompt plus new tokens of a sequence.
        nodes: nodes of a tree, the root included.
    """

    batch: int = 32
    tokens: int = 1 << 20
    nodes: int = 128

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "nodes"):
            if getattr(self, name) < 1:
                raise refusal(ConfigError, f"limits.{name}={getattr(self, name)}", "1 or more")

    def check_shape(self, shape: TreeShape, draft: Draft | None) -> None:
        """Refuse a shape that cannot be drafted.

        Raises:
            ConfigError: there is no draft or it does not take this shape, a width is not positive, or there
                are too many nodes.
        """
        widths = list(shape.widths)
        if shape.depth and draft is None:
            raise ConfigError(
                f"shape {widths} asks for a draft and the engine has none; pass an artifact that brings one"
            )
        if any(width < 1 for width in widths):
            raise refusal(ConfigError, f"shape {widths}", "widths of 1 or more, e.g. [1, 1, 1, 1]")
        if shape.n_nodes > self.nodes:
            raise ConfigError(
                f"shape {widths} has {shape.n_nodes} nodes and limits.nodes={self.nodes}; narrow it"
            )
        if shape.copied and getattr(draft, "completed", None) is None:
            raise ConfigError(
                f"shape {widths} with {shape.copied} copied nodes, and the draft copies nothing; join it "
                "with prompt look-up (decode.lookup=auto)"
            )
        if shape.depth and (own_check := getattr(draft, "check_shape", None)) is not None:
            own_check(shape)

    def served(self, shapes: Sequence[TreeShape], draft: Draft | None) -> tuple[TreeShape, ...]:
        """Return the shapes within these limits that a draft takes, of those that it offers by itself: a
        level may be wider than its vocabulary allows, or a tree deeper than its window.

        Raises:
            ConfigError: the draft takes none of those that fit.
        """
        fit = [one for one in shapes if one.n_nodes <= self.nodes]
        taken, refusals = [], []
        for shape in fit:
            try:
                self.check_shape(shape, draft)
                taken.append(shape)
            except ConfigError as refused:
                refusals.append(refused)
        if refusals and not any(shape.widths for shape in taken):
            raise refusals[0]
        return tuple(taken)

    def check_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        info: TargetInfo,
        after: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Refuse prompts, and tokens to read after them, that do not fit these limits or the target.

        Raises:
            ConfigError: too many or too long, `max_new_tokens` is not positive, or not one `after` for each
                prompt.
            DataError: a prompt is empty or has an id outside the vocabulary.
        """
        if not 1 <= len(prompts) <= self.batch:
            raise refusal(ConfigError, f"{len(prompts)} prompts", f"1 to {self.batch} (limits.batch)")
        if max_new_tokens < 1:
            raise refusal(ConfigError, f"max_new_tokens={max_new_tokens}", "1 or more")
        if after is not None and len(after) != len(prompts):
            raise ConfigError(f"{len(after)} token lists after {len(prompts)} prompts; pass one each")
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise DataError(f"prompt {i} is empty; give it at least one token, a begin-of-text id say")
            if after is not None:
                if not after[i]:
                    raise DataError(f"after[{i}] is empty; give it at least one token, or pass after=None")
                prompt = [*prompt, *after[i]]
            for token in (min(prompt), max(prompt)):
                if not 0 <= token < info.vocab_size:
                    raise refusal(
                        DataError,
                        f"prompt {i} has token id {token}",
                        f"0 to {info.vocab_size - 1}, the ids of target '{info.name}'",
                    )
            for what, most in (("limits.tokens", self.tokens), ("the target's context", info.max_positions)):
                if len(prompt) + max_new_tokens > most:
                    raise ConfigError(
                        f"prompt {i} of {len(prompt)} tokens plus max_new_tokens={max_new_tokens} exceed "
                        f"{what} of {most}; shorten one of them"
                    )


def cannot_gain(draft: Draft | None, batch: int, tokens: int, *, chooses: bool) -> bool:
    """True if a draft knows that it cannot be faster for these texts (see `Draft`).

    Where it cannot, or its method is expected to be slower than plain decoding, one line says so.

    Args:
        draft: of an engine; the line comes once for each.
        batch: number of texts.
        tokens: most tokens of a text.
        chooses: True if shapes are chosen at run time, so that the draft is left out.
    """
    cannot, slower = (
        says(batch, tokens) if (says := getattr(draft, name, None)) else ""
        for name in ("cannot_gain", "slower")
    )
    remedy = "the draft is left out" if chooses else "decode=auto leaves the draft out"
    line = f"{cannot}; {remedy}" if cannot else slower
    if line and draft not in _told:
        log.warning("%s", line)
        _told.add(draft)
    return bool(cannot)


def check_drafted(tree: TokenTree, shape: TreeShape, batch: int) -> None:
    """Refuse a draft's tree that does not have the requested shape.

    Raises:
        ConfigError: it has another size.
    """
    got, asked = tuple(tree.tokens_BN.shape), (batch, shape.n_nodes)
    if got != asked or tree.parents_BN.shape != tree.tokens_BN.shape:
        raise ConfigError(
            f"the draft gave trees of [sequences, nodes] = {list(got)}; asked for {list(asked)}, "
            f"shape {list(shape.widths)}"
        )
