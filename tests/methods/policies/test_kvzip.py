"""KVzip: what is asked for each chunk, and scores against attention matrices written out in full."""

from __future__ import annotations

import pytest
import torch

from longtrain.decoding.evict import Budget
from longtrain.errors import ConfigError
from longtrain.methods import policies
from longtrain.methods.policies.repeat import repeat_of
from longtrain.targets.tokenizer import read_tokenizer

from .naive import Eager, micro
from .runs import kept, prefilled, prompts_of

FIRST = "Repeat the previous context exactly."
LATER = "Repeat the part of the previous context exactly, starting with"


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer("tiny")[0]


@pytest.fixture
def target(tokenizer):
    """Random weights behind the bundled tokenizer; its chat is <|user|>question<|assistant|>answer<|end|>."""
    found = micro(vocab_size=len(tokenizer))
    found.tokenizer = tokenizer
    return found


def asked(tokenizer, prompt, at, *, closed, start=0):
    """The request for the chunk that begins at `at`, written out."""
    text = FIRST if at == start else LATER
    opening = "<|end|><|user|>" if closed else "\n\n"
    quoted = [] if at == start else prompt[max(start, at - 8) : at]
    encode = tokenizer.encode
    return [
        *encode(opening + text, add_special_tokens=False),
        *quoted,
        *encode("<|assistant|>", add_special_tokens=False),
    ]


def reference(target, prompt, chunks, requests, *, sinks, value_norm=False, row_norm=False):
    """Scores of a prompt, s_LGS: rows of whole matrices, made to sum to one over the keys that count."""
    eager, n = Eager(target), len(prompt)
    info = target.info
    s_LGS = torch.zeros(info.n_layers, info.n_kv_heads, n, dtype=torch.float64)
    for (start, stop), request in zip(chunks, requests, strict=True):
        ids = [*prompt, *request, *prompt[start:stop]]
        A_LHTT, values, inputs = attention_and_what_it_read(eager, ids)
        keys = [*range(min(sinks, start)), *range(start, stop), *range(n, len(ids))]
        rows = A_LHTT[:, :, n:, keys]
        rows = rows / rows.sum(-1, keepdim=True)
        if row_norm:
            rows = rows / torch.stack([x_TE[n:].norm(dim=-1) for x_TE in inputs])[:, None, :, None]
        first = min(sinks, start)
        s_LHX = rows[..., first : first + stop - start].amax(2)
        if value_norm:
            lengths = [norms(eager, info, layer, v_TX) for layer, v_TX in enumerate(values)]
            s_LHX = s_LHX * torch.stack(lengths)[..., start:stop]
        s_LGS[..., start:stop] = s_LHX.unflatten(1, (info.n_kv_heads, -1)).amax(2)
    s_LGS[..., :sinks] = 1.0
    return s_LGS


def attention_and_what_it_read(eager, ids):
    """Attention A_LHTT, and what each layer's v_proj gave, [T, G * D], and got, [T, E]."""
    seen = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(
            lambda _module, given, out: seen.append((out[0], given[0][0]))
        )
        for layer in eager.model.model.layers
    ]
    A_LHTT = eager.attention(ids)
    for hook in hooks:
        hook.remove()
    return A_LHTT, *zip(*seen, strict=True)


def norms(eager, info, layer, v_TX):
    """|W_O v| of each query head and token, the product made: [H, T]."""
    weight = eager.model.model.layers[layer].self_attn.o_proj.weight.detach()
    group, D = info.n_heads // info.n_kv_heads, info.head_dim
    heads = []
    for head in range(info.n_heads):
        v_TD = v_TX[:, head // group * D : (head // group + 1) * D]
        heads.append((v_TD @ weight[:, head * D : (head + 1) * D].T).norm(dim=-1))
    return torch.stack(heads)


def chunked(start, n, chunk):
    return [(at, min(at + chunk, n)) for at in range(start, n, chunk)]


@pytest.mark.parametrize(
    ("n", "chunks"),
    [
        (40, [(0, 16), (16, 32), (32, 40)]),
        (32, [(0, 16), (16, 32)]),
        (33, [(0, 16), (16, 32), (32, 33)]),
        (16, [(0, 16)]),
        (5, [(0, 5)]),
    ],
)
def test_chunks_and_requests(target, tokenizer, n, chunks):
    (prompt,) = prompts_of(n, vocab=4096)
    repeat = repeat_of(target, [4 + token % 4000 for token in prompt], chunk=16)
    assert list(repeat.chunks) == chunks
    for turn, (start, stop) in enumerate(chunks):
        request = asked(tokenizer, list(repeat.prompt), start, closed=False)
        assert repeat.rows(turn) == [*request, *repeat.prompt[start:stop]]
    assert repeat.rows(len(chunks)) == []


def test_a_chat_header_is_not_repeated_and_a_closed_turn_is_opened_again(target, tokenizer):
    encode = tokenizer.encode
    open_turn = encode("<|user|>The grey harbour lies in the north.", add_special_tokens=False)
    closed = [*open_turn, *encode("<|assistant|>", add_special_tokens=False)]
    for prompt, is_closed in ((open_turn, False), (closed, True)):
        repeat = repeat_of(target, prompt, chunk=5)
        assert list(repeat.chunks) == chunked(1, len(prompt), 5)
        for turn, (start, _) in enumerate(repeat.chunks):
            assert list(repeat.requests[turn]) == asked(tokenizer, prompt, start, closed=is_closed, start=1)


def test_a_tokenizer_may_have_several_chat_templates(target, tokenizer, monkeypatch):
    prompt = tokenizer.encode("The grey harbour.", add_special_tokens=False)
    one = repeat_of(target, prompt, chunk=99)
    template = tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", {"default": template, "tool_use": template})
    assert repeat_of(target, prompt, chunk=99) == one


def test_without_a_chat_template_a_line_break_asks(target, tokenizer):
    encode = tokenizer.encode
    prompt = encode("The grey harbour.", add_special_tokens=False)
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = None
        request = list(repeat_of(target, prompt, chunk=99).requests[0])
    finally:
        tokenizer.chat_template = template
    assert request == [*encode("\n\n" + FIRST, add_special_tokens=False), *encode("\n")]


@pytest.mark.corners
@pytest.mark.parametrize("norms", [{}, {"value_norm": True}, {"value_norm": True, "row_norm": True}])
@pytest.mark.parametrize("across", ["layers", "heads"])
def test_scores_and_kept_rows(target, tokenizer, norms, across):
    tokens, sinks, chunk = 14, 4, 16
    policy = policies.get("kvzip", budget=Budget(tokens), chunk=chunk, sinks=sinks, across=across, **norms)
    user = tokenizer.encode("<|user|>", add_special_tokens=False)
    prompts = [[4 + t % 4000 for t in p] for p in prompts_of(40, 12, 23, vocab=4096)]
    prompts[2] = user + prompts[2]
    run = prefilled(target, prompts, policy)
    s_LBGS, keep = policy.scores(run), policy.select(run)
    for seq, prompt in enumerate(prompts):
        n, start = len(prompt), 1 if seq == 2 else 0
        chunks = chunked(start, n, chunk)
        requests = [asked(tokenizer, prompt, at, closed=False, start=start) for at, _ in chunks]
        expected = reference(target, prompt, chunks, requests, sinks=sinks, **norms)
        torch.testing.assert_close(s_LBGS[:, seq, :, :n], expected, atol=1e-9, rtol=1e-9)
        if n <= tokens:
            assert kept(keep, seq) == [[list(range(n))] * 2] * 2
            continue
        rows = [
            (-s, layer, head, at)
            for layer, heads in enumerate(expected.tolist())
            for head, row in enumerate(heads)
            for at, s in enumerate(row)
            if at >= sinks
        ]
        groups = [rows] if across == "layers" else [[r for r in rows if r[1] == at] for at in range(2)]
        best = {row[1:] for group in groups for row in sorted(group)[: (tokens - sinks) * 4 // len(groups)]}
        for layer, heads in enumerate(kept(keep, seq)):
            for head, found in enumerate(heads):
                won = [at for at in range(sinks, n) if (layer, head, at) in best]
                assert found == [*range(sinks), *won]
        assert sum(len(row) for heads in kept(keep, seq) for row in heads) == tokens * 4
        counts = {len(row) for heads in kept(keep, seq) for row in heads}
        assert len(counts) > 1 or across == "heads"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"chunk": 0}, "chunk"),
        ({"sinks": -1}, "sinks"),
        ({"across": "tokens"}, "across"),
        ({"window": 32}, "window"),
    ],
)
def test_bad_options_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        policies.get("kvzip", budget=Budget(64), **options)


def test_a_target_without_a_tokenizer_is_refused():
    policy = policies.get("kvzip", budget=Budget(10))
    with pytest.raises(ConfigError, match="no tokenizer"):
        policy.select(prefilled(micro(), prompts_of(30), policy))


def test_a_chat_template_that_leaves_no_room_is_refused(target, tokenizer):
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template + "{{ 'never mind ' * 200 }}"
        with pytest.raises(ConfigError, match="chat template"):
            repeat_of(target, prompts_of(30)[0], chunk=16)
    finally:
        tokenizer.chat_template = template
