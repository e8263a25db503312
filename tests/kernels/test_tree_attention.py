import pytest
import torch
from attention_cases import (
    dense_case,
    distance,
    forest,
    grown,
    heads_alone,
    mask_named,
    per_head_case,
    rows_alone,
)

from longtrain.costs.model import TILE
from longtrain.errors import DataError
from longtrain.kernels.tree_attention import CAUSAL, reference, tree_attention, tree_bits


@pytest.mark.parametrize(("mask", "nodes"), [("none", 5), ("causal", 5), ("tree", 5), ("tree", 8)])
def test_the_reference_follows_the_definition(mask, nodes):
    """Row by row: softmax over the slots it sees, in fp64."""
    B, T, base, lens = 2, 5, 3, (0, 9)
    q, k, v, len_B = dense_case(B=B, T=T, lens=lens, base=base, dtype=torch.float64, nodes=nodes)
    bits, visible_BTT = mask_named(mask, B, T, nodes=nodes)
    out, lse = tree_attention(q, k, v, len_B, bits, scale=0.3, base=base, nodes=nodes)
    for b in range(B):
        for h in range(4):
            for t in range(T):
                slots = [*range(base + lens[b])] + [
                    base + lens[b] + j for j in range(nodes) if visible_BTT[b, t, j]
                ]
                logit = 0.3 * k[b, h // 2, slots] @ q[b, h, t]
                torch.testing.assert_close(lse[b, h, t], torch.logsumexp(logit, 0))
                torch.testing.assert_close(out[b, h, t], torch.softmax(logit, 0) @ v[b, h // 2, slots])


LENS = ([[5, 1], [40, 3], [0, 90]], [[7, 30, 2, 64]])
"""Entries of each sequence and KV head."""


@pytest.mark.parametrize(("mask", "nodes"), [("none", 5), ("causal", 5), ("tree", 5), ("tree", 8)])
@pytest.mark.parametrize("lens", LENS, ids=["batch", "one"])
def test_heads_of_different_lengths_are_sequences_of_their_own(lens, mask, nodes):
    """In one buffer: each head as if it were alone in a dense one, which `tree_attention` serves too."""
    q, k, v, len_BG, first_BG = per_head_case(lens, T=5, dtype=torch.float64, nodes=nodes)
    bits, _ = mask_named(mask, len(lens), 5, nodes=nodes)
    how = {"scale": 0.3, "nodes": nodes}
    out, lse = tree_attention(q, k, v, len_BG, bits, **how, first_BG=first_BG)
    for b, heads, case in heads_alone(q, k, v, len_BG, first_BG, nodes):
        own = bits[b : b + 1] if mask == "tree" else bits
        expected, expected_lse = tree_attention(*case, own, **how)
        torch.testing.assert_close(out[b : b + 1, heads], expected)
        torch.testing.assert_close(lse[b : b + 1, heads], expected_lse)


def test_heads_of_different_lengths_have_their_places():
    q, k, v, len_BG, first_BG = per_head_case(LENS[0])
    wrong = [
        ({"first_BG": first_BG[:, 0]}, r"first_BG \(3,\); allowed: \(3, 2\)"),
        ({"len_B": len_BG[:, 0].contiguous()}, r"len_B \(3,\) of torch.int64; allowed: \(3, 2\)"),
        ({"window": 4}, "window=4 with first_BG; allowed: window=0"),
    ]
    for keys, message in wrong:
        with pytest.raises(DataError, match=message):
            given = {"len_B": len_BG, "mask": CAUSAL, "first_BG": first_BG, **keys}
            tree_attention(q, k, v, scale=1.0, **given)


@pytest.mark.parametrize("mask", ["causal", "tree"])
@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_the_reference_of_a_window_follows_the_definition(mask, window):
    """A new token's place is the prefix's length and the number of its ancestors."""
    q, k, v, len_B = dense_case(B=2, T=9, lens=(4, 30), S=50, dtype=torch.float64)
    bits, visible_BTT = mask_named(mask, 2, 9)
    depth_BT = visible_BTT.sum(-1) - 1
    out, lse = tree_attention(q, k, v, len_B, bits, scale=0.4, window=window, depth_BT=depth_BT)
    for b, n in enumerate(len_B.tolist()):
        for row in range(9):
            ancestors = visible_BTT[b, row].nonzero()[:, 0].tolist()
            seen = [*range(n), *(n + node for node in ancestors)][-window:]
            score_HS = torch.einsum("hd,hsd->hs", q[b, :, row], k[b, :, seen].repeat_interleave(2, 0)) * 0.4
            expected = torch.einsum("hs,hsd->hd", score_HS.softmax(-1), v[b, :, seen].repeat_interleave(2, 0))
            torch.testing.assert_close(out[b, :, row], expected)
            torch.testing.assert_close(lse[b, :, row], score_HS.logsumexp(-1))


def test_a_window_needs_the_positions_of_all_new_tokens():
    q, k, v, len_B = dense_case()
    bits, _ = mask_named("tree", 1, 3)
    wrong = [
        ({"mask": None}, "no mask"),
        ({"mask": bits}, "depths None"),
        ({"mask": CAUSAL, "window": -1}, "-1"),
    ]
    for keys, message in wrong:
        with pytest.raises(DataError, match=message):
            tree_attention(q, k, v, len_B, scale=1.0, **{"window": 4, **keys})


def test_rows_that_see_nothing_give_zero():
    q, k, v, len_B = dense_case(lens=(0,))
    out, lse = tree_attention(q, k, v, len_B, None, scale=1.0)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("N", [1, 63, 64, 65, 128])
def test_bits_and_back(N):
    visible_BNN = forest(2, N) | (torch.rand(2, N, N) < 0.1)
    bits_BNW = tree_bits(visible_BNN)
    assert bits_BNW.dtype == torch.int64 and bits_BNW.shape == (2, N, -(-N // 64))
    back = reference.visible_rows(bits_BNW, rows=N, batch=2, device=torch.device("cpu"))
    assert torch.equal(back, visible_BNN)


def test_a_chain_is_a_tree():
    q, k, v, len_B = dense_case(T=6)
    chain = tree_bits(torch.ones(1, 6, 6, dtype=torch.bool).tril())
    for a, b in zip(
        tree_attention(q, k, v, len_B, CAUSAL, scale=1.0),
        tree_attention(q, k, v, len_B, chain, scale=1.0),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_bad_shapes_are_refused():
    q, k, v, len_B = dense_case()
    with pytest.raises(DataError, match="multiple of KV heads"):
        tree_attention(q[:, :3], k, v, len_B, CAUSAL, scale=1.0)
    with pytest.raises(DataError, match="values"):
        tree_attention(q, k, v.half(), len_B, CAUSAL, scale=1.0)
    with pytest.raises(DataError, match="len_B"):
        tree_attention(q, k, v, len_B.float(), CAUSAL, scale=1.0)
    with pytest.raises(DataError, match="base=38 and 3 new tokens in 40 slots"):
        tree_attention(q, k, v, len_B, CAUSAL, scale=1.0, base=38)
    with pytest.raises(DataError, match="tree mask"):
        tree_attention(q, k, v, len_B, tree_bits(forest(1, 4)), scale=1.0)
    with pytest.raises(DataError, match="3 tokens of 5 nodes without a tree mask"):
        tree_attention(q, k, v, len_B, CAUSAL, scale=1.0, nodes=5)
    with pytest.raises(DataError, match="splits=0"):
        tree_attention(q, k, v, len_B, CAUSAL, scale=1.0, splits=0)


def test_a_tree_larger_than_the_kernel_takes_is_refused():
    with pytest.raises(DataError, match="129 x 129"):
        tree_bits(torch.ones(1, 129, 129, dtype=torch.bool))
    q, k, v, len_B = dense_case(T=129, S=200)
    with pytest.raises(DataError, match="a tree of 129 nodes"):
        tree_attention(q, k, v, len_B, torch.zeros(1, 129, 3, dtype=torch.int64), scale=1.0)


# On a GPU: inputs are rounded to the kernel's dtype first, so only its own rounding counts: weights become
# bf16 (8 bits, relative error 2^-9) before they meet values; errors of many keys average out.

GPU_CASES = [
    {"B": B, "H": 2 * g, "G": 2, "T": T, "lens": tuple(max(0, n - 9 * b) for b in range(B)), "S": n + T + 9}
    for B, g, T, n in [
        (1, 4, 1, 0), (1, 4, 1, 4097), (3, 1, 2, 127), (1, 8, 7, 128), (3, 4, 7, 129), (1, 4, 64, 1),
        (1, 4, 64, 4097), (3, 4, 64, 1000), (1, 1, 128, 300), (1, 8, 128, 4097),
    ]
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "D"),
    [
        (torch.bfloat16, 64),
        (torch.bfloat16, 128),
        (torch.float16, 128),
        (torch.float32, 64),
        (torch.bfloat16, 256),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_kernels_on_a_gpu(case, dtype, D):
    q, k, v, len_B = dense_case(**case, D=D, dtype=dtype, device="cuda")
    for name in ("none", "causal", "tree"):
        mask, _ = mask_named(name, len(len_B), q.shape[2], "cuda")
        out, lse = tree_attention(q, k, v, len_B, mask, scale=D**-0.5)
        expected, expected_lse = reference.tree_attention(
            q.double(), k.double(), v.double(), len_B, mask, scale=D**-0.5
        )
        assert distance(out, expected) <= (1e-5 if dtype == torch.float32 else 4e-3)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "D"), [(1, 128), (100, 256), (512, 128)])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_windows_on_a_gpu(case, window, D):
    q, k, v, len_B = dense_case(**case, D=D, dtype=torch.bfloat16, device="cuda")
    for name in ("causal", "tree"):
        mask, visible_BTT = mask_named(name, len(len_B), q.shape[2], "cuda")
        depth_BT = (visible_BTT.sum(-1) - 1).cuda()
        how = {"scale": D**-0.5, "window": window, "depth_BT": depth_BT}
        out, lse = tree_attention(q, k, v, len_B, mask, **how)
        expected, expected_lse = reference.tree_attention(
            q.double(), k.double(), v.double(), len_B, mask, **how
        )
        assert distance(out, expected) <= 4e-3
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=0)


@pytest.mark.gpu
def test_one_captured_graph_serves_every_length():
    q, k, v, len_B = dense_case(
        T=8, H=8, G=2, D=64, S=3000, lens=(2900,), dtype=torch.bfloat16, device="cuda"
    )
    mask, _ = mask_named("tree", 1, 8, "cuda")
    tree_attention(q, k, v, len_B, mask, scale=0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tree_attention(q, k, v, len_B, mask, scale=0.125)
    for n in (0, 5, 640, 2900):
        len_B.fill_(n)
        graph.replay()
        expected, expected_lse = reference.tree_attention(
            q.double(), k.double(), v.double(), len_B, mask, scale=0.125
        )
        assert distance(out, expected) <= 4e-3
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "nodes"), [(1, 1), (5, 21), (64, 64), (17, 128)])
def test_bits_of_a_mask_on_a_gpu(rows, nodes):
    visible = torch.rand(2, nodes, rows, generator=torch.Generator().manual_seed(0)).lt(0.5).transpose(1, 2)
    assert torch.equal(tree_bits(visible.cuda()).cpu(), tree_bits(visible))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("n", [0, 5, 61, 64, 2040, 2044, 8185, 9000])
@pytest.mark.parametrize(
    ("widths", "batch", "H", "G", "D"),
    [
        ((2, 4, 4), 1, 32, 8, 128),
        ((2, 4, 4), 1, 8, 2, 64),
        ((3, 6, 6), 1, 16, 8, 64),
        ((4, 8, 3), 1, 16, 2, 128),
        ((2, 2), 3, 8, 4, 64),
        ((1,) * 15, 1, 32, 8, 128),
        ((2, 4, 4), 1, 4, 1, 256),
    ],
)
def test_a_row_of_a_step_has_the_bits_of_the_row_alone(widths, batch, H, G, D, n, window):
    """Steps of up to 16 rows, at the ends of tiles and where the tiles of each split become one more."""
    visible_BTT = torch.stack([grown(widths) for _ in range(batch)])
    T = visible_BTT.shape[1]
    lens = tuple(n + 7 * b for b in range(batch))
    q, k, v, len_B = dense_case(
        B=batch, T=T, H=H, G=G, D=D, lens=lens, S=max(lens) + T + 9, dtype=torch.bfloat16, device="cuda"
    )
    mask = CAUSAL if max(widths) == 1 else tree_bits(visible_BTT).cuda()
    how = {"scale": D**-0.5, "window": window}
    depth_BT = (visible_BTT.sum(-1) - 1).cuda()
    out, lse = tree_attention(q, k, v, len_B, mask, **how, depth_BT=depth_BT)
    for row, case in enumerate(rows_alone(q, k, v, len_B, visible_BTT)):
        own, own_lse = tree_attention(*case, CAUSAL, **how)
        assert torch.equal(own[:, :, 0], out[:, :, row]) and torch.equal(own_lse[:, :, 0], lse[:, :, row])


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "D"), [(4, 256), (16, 128), (8, 64)])
@pytest.mark.parametrize("T", [1, 5, 11, 60])
def test_heads_of_different_lengths_on_a_gpu(T, H, D):
    """Each has the bits that it has alone, with the splits of the whole launch."""
    lens = [[2000, 3, 640, 1], [64, 5000, 63, 129]]
    case = per_head_case(lens, T=T, H=H, D=D, dtype=torch.bfloat16, device="cuda")
    q, k, v, len_BG, first_BG = case
    for name in ("none", "causal", "tree"):
        mask, _ = mask_named(name, 2, T, "cuda")
        how = {"scale": D**-0.5, "splits": 9}
        out, lse = tree_attention(q, k, v, len_BG, mask, **how, first_BG=first_BG)
        for b, heads, alone in heads_alone(q, k, v, len_BG, first_BG, T):
            own = mask[b : b + 1] if name == "tree" else mask
            # twice, for as many new tokens in a step: their number decides between two paths
            own = own.repeat(2, 1, 1) if name == "tree" else own
            q_own, k_own, v_own, n = (torch.cat((x, x)) for x in alone)
            one, one_lse = tree_attention(q_own, k_own, v_own, n, own, **how)
            assert torch.equal(out[b, heads], one[0]) and torch.equal(lse[b, heads], one_lse[0])
            double = (x.double() for x in (q_own, k_own, v_own))
            expected, _ = reference.tree_attention(*double, n, own, scale=D**-0.5)
            assert distance(one, expected) <= 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "G", "D"), [(4, 1, 256), (32, 8, 128), (8, 2, 64)])
@pytest.mark.parametrize(("window", "T"), [(128, 1), (512, 5), (512, 11), (512, 60)])
def test_dropped_tiles_change_no_bits(window, T, H, G, D):
    """As in a cache of the last entries, of a chain and of a tree, in half precision."""
    lens = (2000, 1003)
    q, k, v, lens_B = dense_case(
        B=2, H=H, G=G, T=T, D=D, lens=lens, S=2100, dtype=torch.bfloat16, device="cuda"
    )
    dropped_B = (lens_B - window + 1) // TILE * TILE
    index = (dropped_B[:, None] + torch.arange(900, device="cuda")).clamp(max=2099)
    last = [x.gather(2, index[:, None, :, None].expand(-1, G, -1, D)) for x in (k, v)]
    for name in ("causal", "tree"):
        mask, visible_BTT = mask_named(name, 2, T, "cuda")
        depth_BT = (visible_BTT.sum(-1) - 1).expand(2, -1).contiguous().cuda()
        how = {"scale": D**-0.5, "window": window, "depth_BT": depth_BT}
        whole = tree_attention(q, k, v, lens_B, mask, **how)
        same = tree_attention(q, *last, lens_B, mask, **how, dropped_B=dropped_B)
        assert all(torch.equal(*pair) for pair in zip(whole, same, strict=True))
