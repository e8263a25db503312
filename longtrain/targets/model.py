"""The frozen target: embeddings, rotary, forward over a cache, and forward over a packed sequence.

Shapes: B batch, T new tokens, E hidden dim, G KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from longtrain.cache import layered
from longtrain.cache.base import Causal, KVCache
from longtrain.cache.dense import DenseCache
from longtrain.cache.packed import PackedCapture
from longtrain.data.chat.mask import apply_template
from longtrain.errors import ConfigError, ConflictError
from longtrain.kernels.fused_layer import Rotation
from longtrain.kernels.small_linear import serves, small_linear
from longtrain.targets.attention import AttentionHook, Inputs, LeaveEarly, Pass, without_idle_windows
from longtrain.targets.families import Family, family_of, plain_norm
from longtrain.targets.families.experts import use_experts
from longtrain.targets.fused import FusedDecoder
from longtrain.targets.rotary import both_halves
from longtrain.targets.sharded import Shards, whole
from longtrain.targets.step import OutputRequest, PackedStep, TargetStep, TokenBatch
from longtrain.targets.tokenizer import GrowingText, words_of
from longtrain.targets.weights import rebuild_buffers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from longtrain.cache.layered import LayeredCache
    from longtrain.targets.info import TargetInfo


class Target(nn.Module):
    """A frozen Hugging Face decoder whose attention goes through `longtrain.targets.attention`.

    Always in eval mode and without gradients of its own; the caller decides about `torch.no_grad`.
    Build one with `load_target` or `random_target`.

    Args:
        model: a CausalLM built with `attn_implementation="longtrain"`.
        info: facts about it.
        tokenizer: its tokenizer, if any.
        shards: its layers, if they are split over ranks.
    """

    runs = True
    """False if it has no layers, so that `forward` and `packed` raise an error."""

    def __init__(
        self,
        model: PreTrainedModel,
        info: TargetInfo,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        shards: Shards | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = model.requires_grad_(False)
        # a config.json may set these, but nothing here reads such outputs
        model.config.update({"return_dict": True, "output_attentions": False, "output_hidden_states": False})
        without_idle_windows(model, info)
        use_experts(model)
        self.info = info
        self.tokenizer = tokenizer
        self.shards = shards
        self.fused: FusedDecoder | None = None
        """The decoder that runs instead of the model's own (`fuse`)."""
        self.eval()

    def train(self, mode: bool = True) -> Target:
        """Stay in eval mode, whatever mode a trainer sets for its submodules."""
        return super().train(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Target:
        """Move and cast without rounding the buffers, which are recomputed instead."""
        fused = self.fused is not None
        self.unfuse()  # concatenated weights would be copied once per view
        super()._apply(fn, recurse)
        if next(self.model.model.rotary_emb.buffers()).dtype in (torch.bfloat16, torch.float16):
            rebuild_buffers(self.model, self.device)
        return self.fuse() if fused else self

    def fuse(self) -> Target:
        """Run the decoder with concatenated q/k/v and gate/up products and fused operators from now on.

        The same function up to rounding, faster if a forward has few tokens. The weights are concatenated in
        place, a layer at a time; do so before anything stores a reference to them.

        Raises:
            ConflictError: the layers are split over ranks.
        """
        if self.shards is not None:
            raise ConflictError(
                "target.fused joins the weights of a layer, and target.shard=fsdp2 splits them; leave one out"
            )
        if self.fused is None:
            self.fused = FusedDecoder(self.model.model, self.info, self.family)
        return self

    def unfuse(self) -> Target:
        """Run the model's own decoder again, each of its modules with weights of its own."""
        if self.fused is not None:
            self.fused.undo()
            self.fused = None
        return self

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the target's tokenizer, or raise an error if there is none.

        Raises:
            ConfigError: the target has none.
        """
        if self.tokenizer is None:
            raise ConfigError(
                f"target {self.info.name} has no tokenizer, so no text can be given to it; "
                "load it from a folder that has one (tokenizer.json)"
            )
        return self.tokenizer

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """Return the token ids of a text; with `chat`, of a user's message that the target should answer.

        Raises:
            ConfigError: the target has no tokenizer, or no chat template.
            DataError: the chat template fails.
        """
        tokenizer: Any = self.require_tokenizer()
        if not chat:
            return list(tokenizer(text).input_ids)
        if not tokenizer.chat_template:
            raise ConfigError(f"target {self.info.name} has no chat template; pass chat=false")
        message = [{"role": "user", "content": text}]
        asked = apply_template(tokenizer, message, name="prompt", add_generation_prompt=True, tokenize=False)
        return list(tokenizer(asked, add_special_tokens=False).input_ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds; joined, the pieces are the text of all tokens.

        A token that ends inside a character adds nothing, and the one that ends the character all of it.

        Raises:
            ConfigError: the target has no tokenizer.
        """
        text = GrowingText(self.require_tokenizer())
        return [text.add(token) for token in ids]

    def words(self, ids: Sequence[int]) -> list[tuple[str, range]]:
        """Return the words of a text with their tokens' indices; a word begins with white space, or after it.

        Raises:
            ConfigError: the target has no tokenizer.
        """
        return words_of(self.pieces(ids))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.head_weight.dtype

    @property
    def head_weight(self) -> Tensor:
        """The LM head's weight [V, E]; it has no bias."""
        return self.model.lm_head.weight

    @property
    def embed_weight(self) -> Tensor:
        """The input embeddings [V, E], without `embed_scale`."""
        return self.model.model.embed_tokens.weight

    @property
    def embed_scale(self) -> float:
        """Factor on the input embeddings before the first layer (Gemma: sqrt(E), rounded to their dtype)."""
        scale = getattr(self.model.model.embed_tokens, "embed_scale", None)
        return 1.0 if scale is None else float(torch.tensor(self.info.hidden_size**0.5, dtype=self.dtype))

    @property
    def final_norm_weight(self) -> Tensor:
        """Weight [E] of the RMSNorm before the LM head."""
        return plain_norm(self.family, "norm.weight", self.model.model.norm.weight)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the input embeddings [..., E] of token ids [...]."""
        return self.model.model.embed_tokens(ids)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the last layer's output [..., E] after the norm before the LM head."""
        return self.model.model.norm(hidden)

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of final normed hidden states [..., E]."""
        rows_NE = hidden.reshape(-1, hidden.shape[-1])
        if not serves(rows_NE, self.head_weight):
            return linear(hidden, self.head_weight)
        return small_linear(rows_NE, self.head_weight).view(*hidden.shape[:-1], -1)

    def rope(self, pos_BT: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, T, R] of `TargetInfo.rope`, scaled, of the R dims of a head that turn."""
        if self.fused is not None and pos_BT.dtype == torch.int64:
            return self.fused.rope(pos_BT, dtype or self.dtype)
        kinds = ("full_attention",) if hasattr(self.model.model.rotary_emb, "layer_types") else ()
        like = torch.empty(0, device=self.device, dtype=dtype or self.dtype)
        module = self.model.model.rotary_emb
        return both_halves(module, *module(like, pos_BT, *kinds))

    @property
    def family(self) -> Family:
        """What the layers have that differs from Llama's."""
        return family_of(self.info.family)

    @property
    def rotation(self) -> Rotation:
        """The target's rotary embedding for kernels: constants if possible, else a function."""
        return (self.fused and self.fused.angles()) or self.rope

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """Return a layer's weights by Hugging Face name (`self_attn.q_proj.weight`); norms as Llama's."""
        state = self.model.model.layers[layer].state_dict()
        return {name: plain_norm(self.family, name, whole(weight)) for name, weight in state.items()}

    def sinks(self, layer: int) -> Tensor | None:
        """Return a layer's attention sinks [H] (`kernels.attention.sinks`); None: it has none."""
        return getattr(self.model.model.layers[layer].self_attn, "sinks", None)

    def scaling(self, layer: int) -> float:
        """Return the factor on a layer's attention scores."""
        return float(self.model.model.layers[layer].self_attn.scaling)

    def join_ranks(self) -> None:
        """Help with the forwards of all ranks that share the target until every rank has called this.

        All ranks call this where their forwards may differ in number: after each objective, and where one of
        them writes answers. It does nothing if each rank has a target of its own.
        """
        if self.shards is not None:
            self.shards.join_ranks()

    def new_cache(self, batch: int, max_tokens: int, max_nodes: int) -> DenseCache | LayeredCache:
        """Return an empty cache of this target's shape; layers with a window store its entries only.

        Args:
            batch: number of sequences.
            max_tokens: most committed positions of each.
            max_nodes: most tokens of a decoding step.
        """
        return layered.new_cache(**self._cache_sizes(batch=batch, max_tokens=max_tokens, max_nodes=max_nodes))

    def plain_cache(self, batch: int, max_tokens: int, max_nodes: int) -> DenseCache:
        """As `new_cache`, but all layers store the whole text, as eviction and selection need."""
        return DenseCache(**self._cache_sizes(batch=batch, max_tokens=max_tokens, max_nodes=max_nodes))

    def _cache_sizes(self, **sizes: int) -> dict[str, Any]:
        shape = {key: getattr(self.info, key) for key in ("n_layers", "n_kv_heads", "head_dim", "windows")}
        return {**shape, "device": self.device, "dtype": self.dtype, **sizes}

    def forward(
        self,
        rows: TokenBatch,
        cache: KVCache,
        *,
        outputs: OutputRequest = OutputRequest(),  # noqa: B008 (frozen)
        hook: AttentionHook | None = None,
    ) -> TargetStep:
        """Run one step: append the tokens' K and V to the cache's tail; return the requested outputs.

        Nothing is committed here. The LM head runs over the requested tokens only. `hook` receives every
        layer's queries, keys and values.

        Raises:
            ConfigError: logits or late hidden states are requested of a forward that stops early; no such
                layer.
        """
        outputs.check(self.info.n_layers)
        one_pass = Pass(cache, rows.mask, outputs.stop_at_layer, hook)
        cache.expect(rows.n_B)
        hidden: dict[int, Tensor] = {}
        last_BTE = self._run(rows, one_pass, outputs.hidden, hidden)
        if last_BTE is None or outputs.logits == "none":
            return TargetStep(None, hidden)
        if outputs.logits == "last":
            if rows.n_B is None:
                last_BTE = last_BTE[:, -1:]
            else:
                row_B = torch.arange(len(last_BTE), device=last_BTE.device)
                last_BTE = last_BTE[row_B, rows.n_B - 1][:, None]
        return TargetStep(self.head(last_BTE), hidden)

    def packed(
        self,
        ids_T: Tensor,
        pos_T: Tensor,
        bounds: tuple[int, ...],
        outputs: OutputRequest = OutputRequest("none", hidden=(-1,)),  # noqa: B008 (frozen)
        *,
        hook: AttentionHook | None = None,
    ) -> PackedStep:
        """Run a packed sequence of documents, each seeing only itself, causally; the LM head is not run.

        Args:
            ids_T: token ids, int64.
            pos_T: rotary positions, int64 (they restart with each document, or have anchor offsets).
            bounds: document bounds from 0 to T, on the host.
            outputs: hidden states and K and V of any layers, without logits; by default the LM head's input.
            hook: receives every layer's queries, keys and values (of the layer stopped at too); batch 1.

        Raises:
            ConfigError: logits are requested, or outputs beyond the layer to stop at; no such layer.
        """
        outputs.check(self.info.n_layers, packed=True)
        capture = PackedCapture(tuple(bounds), layers=outputs.kv, device=ids_T.device)
        one_pass = Pass(capture, Causal(), outputs.stop_at_layer, hook)
        hidden: dict[int, Tensor] = {}
        rows = TokenBatch(pos_T[None], embeds_BTE=self.embed(ids_T)[None])
        self._run(rows, one_pass, outputs.hidden, hidden)
        return PackedStep({layer: state_BTE[0] for layer, state_BTE in hidden.items()}, capture.kv)

    def _run(
        self, rows: TokenBatch, one_pass: Pass, wanted: tuple[int, ...], hidden: dict[int, Tensor]
    ) -> Tensor | None:
        """Run the decoder without its LM head, filling `hidden`; return None if the hook left early."""
        stop = one_pass.stop_at_layer
        layers = self.info.n_layers if stop is None else stop + 1
        with self.shards.running(layers) if self.shards is not None else nullcontext():
            try:
                if self.fused is not None:
                    last_BTE = self.fused(rows, one_pass, wanted, hidden)
                else:
                    with self._recorded(wanted, hidden), self._shown(one_pass.inputs):
                        last_BTE = self.model.model(
                            inputs_embeds=rows.embeds(self.embed),
                            position_ids=rows.pos_BT,
                            use_cache=False,
                            longtrain_pass=one_pass,
                        ).last_hidden_state
            except LeaveEarly:
                return None
        if -1 in wanted:
            hidden[-1] = last_BTE
        return last_BTE

    @contextmanager
    def _recorded(self, layers: tuple[int, ...], hidden: dict[int, Tensor]) -> Iterator[None]:
        """Context manager that records the outputs of these layers in `hidden`."""

        def keep(layer: int) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                hidden[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [
            self.model.model.layers[layer].register_forward_hook(keep(layer))
            for layer in layers
            if layer != -1
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _shown(self, looks: list[Inputs]) -> Iterator[None]:
        """Context manager that passes each layer's attention input to `looks`."""

        def show(layer: int) -> Any:
            def hook(_module: nn.Module, inputs: tuple[Tensor, ...], keys: dict[str, Any]) -> None:
                x_BTE = keys["hidden_states"] if "hidden_states" in keys else inputs[0]
                for look in looks:
                    look(layer, x_BTE)

            return hook

        handles = [
            layer.self_attn.register_forward_pre_hook(show(index), with_kwargs=True)
            for index, layer in enumerate(self.model.model.layers if looks else ())
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
