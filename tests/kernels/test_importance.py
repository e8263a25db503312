import pytest
import torch
from importance_cases import Case, eager, one, several

from longtrain.errors import DataError
from longtrain.kernels.importance import (
    Span,
    importance,
    kernels_serve,
    own_importance,
    reference,
    suffix_attention,
    suffix_lse,
)
from longtrain.kernels.importance import spans as tables

CASES = {
    "one row, one key": one(1, 1, 4, 1, 16),
    "prefix of none": one(5, 0, 4, 4, 8),
    "several spans": several(8, 2, 16),
    "packed rows": several(4, 4, 12, strided=False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_follows_the_definition(case):
    inputs = case.tensors(torch.float64)
    q, own_k, _, k, _ = inputs
    expected = eager(case, *inputs)
    lse = suffix_lse(q, own_k, k, case.spans, scale=case.scale)
    close = {"atol": 1e-12, "rtol": 1e-12}
    torch.testing.assert_close(lse, expected["lse"], **close)
    for how in ("mean", "max"):
        got = importance(q, lse, k, case.spans, scale=case.scale, reduce=how)
        torch.testing.assert_close(got, expected[how], **close)
    got = own_importance(q, own_k, lse, case.spans, scale=case.scale)
    torch.testing.assert_close(got, expected["own"], **close)
    out, scores = suffix_attention(*inputs, case.spans, scale=case.scale)
    torch.testing.assert_close(out, expected["out"], **close)
    torch.testing.assert_close(scores, expected["mean"], **close)
    unused = torch.ones(case.B, case.T, dtype=torch.bool)
    for span in case.spans:
        unused[span.seq, slice(*span.keys)] = False
    assert unused.any() and not scores.transpose(1, 2)[unused].any()


def test_gradients_of_the_reference():
    case = Case((Span((0, 2), 0, (1, 4)), Span((2, 5), 1, (0, 3))), 2, 1, 3, 2, 4)
    q, own_k, own_v, k, v = case.tensors(torch.float64)
    k, v = k.nan_to_num(), v.nan_to_num()

    def both(*rows):
        return suffix_attention(*rows, k, v, case.spans, scale=case.scale)

    assert torch.autograd.gradcheck(both, (q, own_k, own_v))


def test_column_sums_of_a_causal_softmax_chunk_by_chunk():
    """Prefix and own columns of each chunk add up to the columns of the whole triangle."""
    n, step = 11, 4
    q, k = torch.randn(2, n, 2, 8, dtype=torch.float64)
    logit_HNN = torch.einsum("nhd,khd->hnk", q, k) * 0.3
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    expected_HN = torch.softmax(logit_HNN.masked_fill(later, -torch.inf), -1).sum(1)
    got_HN = torch.zeros(2, n, dtype=torch.float64)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        m = rows.stop - start
        spans = [Span((0, m), 0, (0, start))]
        lse = suffix_lse(q[rows], k[rows], k[None], spans, scale=0.3)
        got_HN += m * importance(q[rows], lse, k[None], spans, scale=0.3)[0]
        got_HN[:, rows] += m * own_importance(q[rows], k[rows], lse, spans, scale=0.3).T
    torch.testing.assert_close(got_HN, expected_HN, atol=1e-12, rtol=1e-12)


def test_half_precision_rows_are_reduced_in_fp32_even_under_autocast():
    case = one(6, 40, 4, 2, 16)
    halves = case.tensors(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, scores = suffix_attention(*halves, case.spans, scale=case.scale)
    expected = eager(case, *halves)
    assert out.dtype == torch.bfloat16 and scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected["mean"], atol=1e-7, rtol=1e-5)


def test_no_rows_by_keys_for_the_prefix_gradient():
    """The prefix is constant even where the caller forgot to detach it."""
    case = one(2, 6, 2, 1, 4)
    q, own_k, own_v, k, v = case.tensors(torch.float32)
    k, v = (x.nan_to_num().requires_grad_() for x in (k, v))
    out, scores = suffix_attention(q, own_k, own_v, k, v, case.spans, scale=1.0)
    (out.sum() + scores[0, 0, 3]).backward()
    assert k.grad is None and v.grad is None
    assert all(x.grad.abs().sum() > 0 for x in (q, own_v))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([], "cover all queries"),
        ([Span((0, 3), 0, (0, 4))], "cover all queries"),
        ([Span((1, 4), 0, (0, 4))], "after query 0"),
        ([Span((0, 0), 0, (0, 4)), Span((0, 4), 0, (0, 4))], "1 or more"),
        ([Span((0, 4), 0, (0, 10))], r"0\.\.9"),
        ([Span((0, 4), 1, (0, 9))], "below 1"),
        ([Span((0, 4), 0, (5, 4))], "keys"),
        ([Span((0, 2), 0, (0, 5)), Span((2, 4), 0, (4, 6))], "share keys 4..5"),
    ],
)
def test_bad_spans_are_refused(spans, message):
    q, own_k, k = torch.zeros(4, 2, 8), torch.zeros(4, 1, 8), torch.zeros(1, 9, 1, 8)
    with pytest.raises(DataError, match=message):
        suffix_lse(q, own_k, k, spans, scale=1.0)


def test_bad_shapes_are_refused():
    spans = [Span((0, 4), 0, (0, 9))]
    q, own, k = torch.zeros(4, 3, 8), torch.zeros(4, 2, 8), torch.zeros(1, 9, 2, 8)
    with pytest.raises(DataError, match="3 query heads"):
        suffix_lse(q, own, k, spans, scale=1.0)
    q = torch.zeros(4, 4, 8)
    with pytest.raises(DataError, match="own keys"):
        suffix_lse(q, own[:3], k, spans, scale=1.0)
    with pytest.raises(DataError, match="values"):
        suffix_attention(q, own, own, k, k[:, :5], spans, scale=1.0)
    with pytest.raises(DataError, match="reduce='sum'"):
        importance(q, torch.zeros(4, 4), k, spans, scale=1.0, reduce="sum")


@pytest.mark.parametrize(("rows", "keys", "programs"), [(1, 8, 1), (2, 8, 7), (4, 16, 1000), (64, 32, 3)])
def test_tables_give_every_pair_of_row_and_key_to_one_program(rows, keys, programs):
    case = several(4, 1, 8)
    items, blocks = tables.row_items(case.spans, rows, keys, programs, torch.device("cpu"))
    N = case.spans[-1].rows[1]
    seen, own = torch.zeros(N, case.B, case.T, dtype=torch.int), torch.zeros(N, N, dtype=torch.int)
    for first, stop, seq, low, high, own_low, own_high, n in items.tolist():
        seen[first:stop, seq, low:high] += 1
        own[first:stop, own_low:own_high] += 1
        assert any(span.rows[0] == own_low and span.rows[1] == own_low + n for span in case.spans)
    for first, stop, item, count in blocks.tolist():
        assert {tuple(x[:2]) for x in items[item : item + count].tolist()} == {(first, stop)}
    columns = torch.zeros_like(seen)
    for seq, low, high, first, stop, n in tables.key_items(case.spans, keys, 0, torch.device("cpu")).tolist():
        assert high - low <= keys and stop - first == n
        columns[first:stop, seq, low:high] += 1
    expected, expected_own = torch.zeros_like(seen), torch.zeros_like(own)
    for span in case.spans:
        expected[slice(*span.rows), span.seq, slice(*span.keys)] = 1
        for row in range(*span.rows):
            expected_own[row, span.rows[0] : row + 1] = 1
    assert torch.equal(seen, expected) and torch.equal(columns, expected)
    assert torch.equal(own.tril(), expected_own)


# On a GPU, and in small on a CPU, where the reference serves. Inputs are rounded to the kernels' dtype first,
# so only the kernels' own rounding counts: weights become bf16 (8 bits, relative error 2^-9) before they meet
# values or keys; errors of many keys average out.


def chunked(case: Case, q, own_k, own_v, k, v, d_out, d_s):
    """The reference in fp32 with autograd, a few heads at a time: out, scores and the rows' gradients."""
    group = case.H // case.G
    parts = []
    for g in range(case.G):
        heads = slice(g * group, (g + 1) * group)
        rows = [
            x.detach().float().requires_grad_()
            for x in (q[:, heads], own_k[:, g : g + 1], own_v[:, g : g + 1])
        ]
        cache = [x[:, :, g : g + 1].float() for x in (k, v)]
        out, s = reference.suffix_attention(*rows, *cache, case.spans, scale=case.scale)
        grads = torch.autograd.grad((out * d_out[:, heads]).sum() + (s * d_s[:, heads]).sum(), rows)
        parts.append((out.detach(), s.detach(), *grads))
    out, s, *grads = (torch.cat(x, -2) for x in zip(*parts, strict=True))  # heads are the last dim but one
    return out, s, grads


GPU_CASES = {
    "32 rows over 32K keys": one(32, 32768, 32, 8, 128),
    "no groups": one(32, 4097, 8, 8, 128),
    "groups of 8": one(32, 8191, 32, 4, 64),
    "groups of 7": one(19, 5000, 28, 4, 128, strided=False),
    "512 rows": one(512, 2049, 8, 2, 128),
    "one row": one(1, 32767, 32, 8, 128),
    "several": several(8, 2, 128),
    "large heads": one(33, 1025, 8, 2, 256),
    "odd heads": one(33, 1025, 6, 2, 80),
}


def shrunk(case: Case) -> Case:
    """The heads and strides of a case over few rows and keys."""
    if len(case.spans) > 1:
        return case
    (_, rows), (start, stop) = case.spans[0].rows, case.spans[0].keys
    return one(min(rows, 20), min(stop - start, 70), case.H, case.G, case.D, strided=case.strided)


def bf16_stays_near_fp32(case: Case, device: str) -> None:
    """Results and gradients against `chunked`, the single functions against the reference."""
    inputs = case.tensors(torch.bfloat16, device)
    q, own_k, _, k, _ = inputs
    assert kernels_serve(q, k) == (device == "cuda")
    rng = torch.Generator(device).manual_seed(1)
    d_out = torch.randn(q.shape, device=device, generator=rng).bfloat16()
    d_s = torch.randn(case.B, case.H, case.T, device=device, generator=rng)
    expected_out, expected_s, expected_grads = chunked(case, *inputs, d_out.float(), d_s)
    out, s = suffix_attention(*inputs, case.spans, scale=case.scale)
    grads = torch.autograd.grad((out, s), inputs[:3], (d_out, d_s))
    # Products of bf16 numbers are exact in fp32: the scores have fp32 rounding of logits up to about 10 only.
    torch.testing.assert_close(s, expected_s, atol=1e-8, rtol=2e-4)
    assert (out.float() - expected_out).norm() <= 5e-3 * expected_out.norm()
    for mine, theirs in zip(grads, expected_grads, strict=True):
        assert torch.isfinite(mine).all()
        assert (mine.float() - theirs).norm() <= 1e-2 * theirs.norm() + 1e-6

    rows = [x.detach() for x in (q, own_k)]
    lse = suffix_lse(*rows, k, case.spans, scale=case.scale)
    expected = reference.suffix_lse(*(x.float() for x in rows), k, case.spans, scale=case.scale)
    torch.testing.assert_close(lse, expected, atol=1e-4, rtol=1e-5)
    for how in ("mean", "max"):
        got = importance(rows[0], lse, k, case.spans, scale=case.scale, reduce=how)
        wide = reference.importance(rows[0], expected, k, case.spans, scale=case.scale, reduce=how)
        torch.testing.assert_close(got, wide, atol=1e-8, rtol=2e-4)
    got = own_importance(*rows, lse, case.spans, scale=case.scale)
    wide = reference.own_importance(*rows, expected, case.spans, scale=case.scale)
    torch.testing.assert_close(got, wide, atol=1e-8, rtol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_bf16_on_a_gpu(case):
    bf16_stays_near_fp32(case, "cuda")


@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_bf16_on_a_cpu(case):
    bf16_stays_near_fp32(shrunk(case), "cpu")


DEVICES = [pytest.param("cuda", 1500, marks=pytest.mark.gpu), ("cpu", 90)]


@pytest.mark.parametrize(("device", "keys"), DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 3e-3)], ids=["fp32", "fp16"]
)
def test_other_dtypes(dtype, tolerance, device, keys):
    """fp32 products are not rounded to tf32."""
    case = one(20, keys, 8, 2, 64)
    inputs = case.tensors(dtype, device)
    d_out = torch.randn(inputs[0].shape, device=device).to(dtype)
    d_s = torch.randn(case.B, case.H, case.T, device=device)
    expected_out, expected_s, expected_grads = chunked(case, *inputs, d_out.float(), d_s)
    out, s = suffix_attention(*inputs, case.spans, scale=case.scale)
    grads = torch.autograd.grad((out, s), inputs[:3], (d_out, d_s))
    torch.testing.assert_close(s, expected_s, atol=1e-8, rtol=2e-4)
    assert (out.float() - expected_out).norm() <= tolerance * expected_out.norm()
    for mine, theirs in zip(grads, expected_grads, strict=True):
        assert (mine.float() - theirs).norm() <= 2 * tolerance * theirs.norm()


@pytest.mark.gpu
def test_memory_stays_far_below_rows_times_keys():
    """Rows x keys in fp32 would be 4 GiB; what is allowed are the results and some partial sums."""
    case = one(512, 65536, 32, 8, 128)
    k = torch.randn(1, 8, case.T, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    q = torch.randn(512, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    own = torch.randn(512, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, s = suffix_attention(q, own, own, k, k, case.spans, scale=case.scale)
    (out.float().sum() + s.square().sum()).backward()
    assert torch.cuda.max_memory_allocated() - before < 2**28


@pytest.mark.gpu
def test_the_host_never_waits():
    case = several(8, 2, 64)
    inputs = case.tensors(torch.bfloat16, "cuda")
    for mode in ("default", "error"):  # compile, then look
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for table in (tables.row_items, tables.key_items, tables.own_items):
                table.cache_clear()
            out, s = suffix_attention(*inputs, case.spans, scale=case.scale)
            (out.float().sum() + s.sum()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
