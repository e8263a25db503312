import pytest
import torch

from longtrain.cache import dense
from longtrain.cache.base import Causal, PrefixOnly, Tree
from longtrain.cache.dense import DenseCache
from longtrain.errors import ConfigError
from tests.kernels import plain_attention as reference

B, H, G, D, LAYERS = 3, 4, 2, 8, 2
SCALE = 0.3


@pytest.fixture(params=["masked", "split"], autouse=True)
def path(request, monkeypatch):
    """Every test runs over both ways to attend; the split one is a GPU's, forced here from 2 keys on."""
    if request.param == "split":
        monkeypatch.setattr(dense, "split_serves", lambda q: True)
        monkeypatch.setattr(dense, "_MIN_PREFIX", 2)
        monkeypatch.setattr(dense, "_SLACK", 3)
    return request.param


def cache(max_tokens=300, max_nodes=8, batch=B):
    return DenseCache(
        n_layers=LAYERS,
        n_kv_heads=G,
        head_dim=D,
        batch=batch,
        max_tokens=max_tokens,
        max_nodes=max_nodes,
        device="cpu",
        dtype=torch.float64,
    )


class Model:
    """What the cache should hold, growing tensors of each layer and sequence, recomputed without tricks."""

    def __init__(self, seed=0):
        self.rng = torch.Generator().manual_seed(seed)
        self.kept = [[torch.zeros(2, G, 0, D, dtype=torch.float64) for _ in range(B)] for _ in range(LAYERS)]

    def rows(self, T):
        q = torch.randn(LAYERS, B, H, T, D, generator=self.rng, dtype=torch.float64)
        kv = torch.randn(LAYERS, 2, B, G, T, D, generator=self.rng, dtype=torch.float64)
        return q, kv

    def attend(self, layer, q, kv, visible_BTT):
        outs = []
        for b in range(B):
            prefix = self.kept[layer][b]
            k, v = torch.cat([prefix, kv[:, b]], 2)
            seen = torch.cat([torch.ones(q.shape[2], prefix.shape[2], dtype=torch.bool), visible_BTT[b]], 1)
            one = slice(b, b + 1)
            outs.append(reference.masked_attention(q[one], k[None], v[None], seen[None], scale=SCALE)[0])
        return torch.cat(outs)

    def commit(self, kv, path_BP, n_B):
        for layer in range(LAYERS):
            for b, n in enumerate(n_B.tolist()):
                accepted = kv[layer, :, b][:, :, path_BP[b, :n]]
                self.kept[layer][b] = torch.cat([self.kept[layer][b], accepted], 2)


def step(store, model, mask, T, visible_BTT, path_BP, n_B, *, path_given=True):
    q, kv = model.rows(T)
    for layer in range(LAYERS):
        store.write(layer, kv[layer, 0], kv[layer, 1])
        out, _ = store.attend(layer, q[layer], mask=mask, scale=SCALE)
        expected = model.attend(layer, q[layer], kv[layer], visible_BTT)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    store.commit(path_BP if path_given else None, n_B)
    model.commit(kv, path_BP, n_B)
    assert store.len_B.tolist() == [kept.shape[2] for kept in model.kept[0]]


def causal(T):
    return torch.ones(B, T, T, dtype=torch.bool).tril()


def arange(T):
    return torch.arange(T).expand(B, T)


def random_tree(N, rng):
    """Parents below the child, as an ancestor-or-self mask, and one root-to-leaf path of each sequence."""
    visible = torch.eye(N, dtype=torch.bool).repeat(B, 1, 1)
    paths = torch.zeros(B, N, dtype=torch.int64)
    n_B = torch.zeros(B, dtype=torch.int64)
    for b in range(B):
        parents = [-1] + [int(torch.randint(0, i, (1,), generator=rng)) for i in range(1, N)]
        for i in range(1, N):
            visible[b, i] |= visible[b, parents[i]]
        leaf = int(torch.randint(0, N, (1,), generator=rng))
        path = [i for i in range(N) if visible[b, leaf, i]]
        paths[b, : len(path)] = torch.tensor(path)
        n_B[b] = len(path)
    return visible, paths, n_B


def prefilled():
    store, model = cache(), Model()
    step(store, model, Causal(), 9, causal(9), arange(9), torch.tensor([9, 4, 3]), path_given=False)
    return store, model


def test_prefill_of_prompts_of_different_lengths_then_single_tokens():
    store, model = prefilled()
    for _ in range(4):
        step(store, model, Causal(), 1, causal(1), arange(1), torch.ones(B, dtype=torch.int64))


def test_chains_with_different_acceptance_in_each_row():
    store, model = prefilled()
    for n_B in ([1, 3, 5], [5, 5, 0], [2, 1, 4]):
        step(store, model, Causal(), 5, causal(5), arange(5), torch.tensor(n_B))


def test_trees_with_different_paths_in_each_row():
    store, model = prefilled()
    rng = torch.Generator().manual_seed(3)
    for N in (7, 7, 4, 8, 1):
        visible, path_BP, n_B = random_tree(N, rng)
        step(store, model, Tree(visible), N, visible, path_BP, n_B)


def test_a_tree_sees_its_prefix_and_its_ancestors():
    store, model = prefilled()
    visible, _, _ = random_tree(6, torch.Generator().manual_seed(4))
    q, kv = model.rows(6)
    store.write(1, kv[1, 0], kv[1, 1])
    out, lse = store.attend(1, q[1], mask=Tree(visible), scale=SCALE)
    expected, expected_lse = reference.tree_attention(
        q[1], store.k_LBGSD[1], store.v_LBGSD[1], store.len_B, visible, scale=SCALE
    )
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    if lse is not None:
        torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)


def test_a_tree_on_an_empty_cache():
    store, model = cache(), Model()
    visible, path_BP, n_B = random_tree(6, torch.Generator().manual_seed(5))
    step(store, model, Tree(visible), 6, visible, path_BP, n_B)


def test_the_split_path_runs_when_forced_and_gives_the_lse(path):
    store, model = prefilled()
    step(store, model, Causal(), 2, causal(2), arange(2), torch.tensor([2, 1, 2]))
    q, kv = model.rows(2)
    store.write(0, kv[0, 0], kv[0, 1])
    _, lse = store.attend(0, q[0], mask=Causal(), scale=SCALE)
    assert (lse is not None) == (path == "split")
    if lse is not None:
        keys = torch.cat([model.kept[0][1], kv[0, :, 1]], 2)
        seen = torch.ones(1, 2, keys.shape[2], dtype=torch.bool)
        seen[0, 0, -1] = False
        one = slice(1, 2)
        _, expected = reference.masked_attention(q[0][one], keys[:1], keys[1:], seen, scale=SCALE)
        torch.testing.assert_close(lse[1], expected[0])


@pytest.mark.parametrize("window", [0, 3, 50])
def test_many_tokens_after_known_lengths_need_no_mask(window, monkeypatch):
    """As the host knows the lengths after `rewind`, each sequence is a segment; the result is the mask's."""
    monkeypatch.setattr(dense, "_MANY", 6)
    store, model = prefilled()
    q, kv = model.rows(6)

    def attended():
        store.write(1, kv[1, 0], kv[1, 1])
        if window:
            return store.attend_window(1, q[1], mask=Causal(), scale=SCALE, window=window)[0]
        return store.attend(1, q[1], mask=Causal(), scale=SCALE)[0]

    masked = attended()
    monkeypatch.setattr(store, "_visible_rows", None)  # no mask is built
    with pytest.raises(TypeError):
        attended()
    store.rewind([9, 4, 3])
    torch.testing.assert_close(attended(), masked, atol=1e-12, rtol=1e-12)
    store.commit(None, torch.tensor([6, 6, 6]))
    with pytest.raises(TypeError):  # a commit's lengths are on the device
        attended()


@pytest.mark.parametrize("window", [0, 3])
def test_a_prompt_with_its_lse_needs_no_mask(window, monkeypatch):
    """Attention with sinks asks for the lse of a whole prompt, whose mask would be tokens x tokens."""
    q, kv = torch.randn(2, 6, 7, 4).double(), torch.randn(2, 2, 2, 7, 4).double()
    found = []
    for many in (8, 7):
        monkeypatch.setattr(dense, "_MANY", many)
        store = DenseCache(
            n_layers=1, n_kv_heads=2, head_dim=4, batch=2, max_tokens=9, max_nodes=0,
            device="cpu", dtype=torch.float64,
        )  # fmt: skip
        if many == 7:
            monkeypatch.setattr(store, "_visible_rows", None)
        store.write(0, *kv)
        found.append(store.attend_lse(0, q, mask=Causal(), scale=SCALE, window=window))
    for masked, segments in zip(*found, strict=True):
        torch.testing.assert_close(segments, masked, atol=1e-12, rtol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim", "window"), [((14, 2), 64, 0), ((4, 1), 256, 300), ((8, 8), 128, 0)])
def test_many_tokens_in_half_precision_on_a_gpu(heads, dim, window):
    """Segments of different lengths through flash attention, against fp32 under a mask on a CPU."""
    (n_heads, n_kv), T, lengths = heads, 200, [700, 512, 90]
    rng = torch.Generator("cuda").manual_seed(0)
    found = {}
    draw = {"device": "cuda", "generator": rng}
    before = torch.randn(2, 3, n_kv, 700, dim, **draw).bfloat16()
    q, (k, v) = torch.randn(3, n_heads, T, dim, **draw).bfloat16(), torch.randn(2, 3, n_kv, T, dim, **draw)
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        sizes = {"n_layers": 1, "n_kv_heads": n_kv, "head_dim": dim, "batch": 3, "max_tokens": 1000}
        store, place = DenseCache(**sizes, max_nodes=0, device=device, dtype=dtype), (device, dtype)
        store.write(0, *before.to(*place))
        store.commit(None, torch.tensor(lengths, device=device))
        if dtype == torch.bfloat16:
            store.rewind(lengths)
        store.write(0, k.bfloat16().to(*place), v.bfloat16().to(*place))
        args = {"mask": Causal(), "scale": dim**-0.5}
        if window:
            found[device] = store.attend_window(0, q.to(*place), **args, window=window)[0]
        else:
            found[device] = store.attend(0, q.to(*place), **args)[0]
    torch.testing.assert_close(found["cuda"].cpu().float(), found["cpu"], atol=1e-2, rtol=2e-2)


def test_lengths_stay_right_when_the_host_bound_drifts():
    store, model = prefilled()
    for _ in range(40):  # the bound grows by 5 a step, the truth by 1 or 2
        step(store, model, Causal(), 5, causal(5), arange(5), torch.tensor([1, 2, 1]))
    assert store._high - int(store.len_B.max()) <= dense._SLACK + 5
    assert store._low <= int(store.len_B.min())


def test_prefix_only_sees_the_prefix_and_writes_nothing():
    store, model = prefilled()
    before = store.k_LBGSD.clone()
    q, _ = model.rows(3)
    nothing = torch.zeros(2, B, G, 0, D, dtype=torch.float64)
    for layer in range(LAYERS):
        out, _ = store.attend(layer, q[layer], mask=PrefixOnly(), scale=SCALE)
        expected = model.attend(layer, q[layer], nothing, torch.ones(B, 3, 0, dtype=torch.bool))
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    assert torch.equal(before, store.k_LBGSD)


def test_an_empty_prefix_gives_zeros():
    store, model = cache(), Model()
    q, kv = model.rows(2)
    assert not store.attend(0, q[0], mask=PrefixOnly(), scale=SCALE)[0].any()
    store.write(0, kv[0, 0], kv[0, 1])
    store.commit(None, torch.tensor([2, 0, 1]))
    out, _ = store.attend(0, q[0], mask=PrefixOnly(), scale=SCALE)
    assert out[0].any() and not out[1].any() and not out.isnan().any()


def test_rejected_rows_leave_no_trace():
    """Rollback is doing nothing: after rejected garbage the next step is as if it had not been."""
    store, model = prefilled()
    junk = torch.full((B, G, 8, D), 1e6, dtype=torch.float64)
    for layer in range(LAYERS):
        store.write(layer, junk, junk)
    store.commit(arange(8), torch.zeros(B, dtype=torch.int64))
    step(store, model, Causal(), 3, causal(3), arange(3), torch.tensor([3, 2, 1]))


def test_a_full_cache_says_so_and_counts_what_is_there_not_the_bound():
    store = cache(max_tokens=10, max_nodes=5, batch=1)
    row = torch.zeros(1, G, 5, D, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.int64)
    for _ in range(11):  # one accepted row each; the bound alone would refuse the third step
        store.write(0, row, row)
        store.commit(torch.arange(5)[None], one)
    with pytest.raises(ConfigError, match=r"11 tokens committed and 5 new tokens, room for 15"):
        store.write(0, row, row)


def test_bytes_count_everything():
    store = cache(max_tokens=10, max_nodes=6)
    assert store.bytes() == 2 * LAYERS * B * G * 16 * D * 8 + B * 8


@pytest.mark.corners
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("T", [1, 2, 30, 140])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("lengths", [[0, 0], [9, 0], [5, 60]])
def test_some_sequences_of_a_cache_are_a_cache_of_their_own(lengths, window, T, in_place, monkeypatch):
    """Sequences 3 and 1 of four go on from their first entries by two steps; the others stay as they are."""
    monkeypatch.setattr(dense, "kernel_serves", lambda *tensors: in_place)  # a GPU's kernel, by its reference
    store, own, rng = cache(batch=4), cache(batch=2), torch.Generator().manual_seed(T)
    for x in (store.k_LBGSD, store.v_LBGSD):
        x.copy_(torch.randn(x.shape, generator=rng, dtype=x.dtype))
    before = store.k_LBGSD.clone(), store.v_LBGSD.clone()
    own.k_LBGSD[:], own.v_LBGSD[:] = store.k_LBGSD[:, [3, 1]], store.v_LBGSD[:, [3, 1]]
    own.rewind(lengths)
    some = store.some(torch.tensor([3, 1]), torch.tensor(lengths), lengths)
    for n_B in (torch.tensor([T, T - T // 2]), torch.tensor([1, T])):
        q = torch.randn(LAYERS, 2, H, T, D, generator=rng, dtype=torch.float64)
        kv = torch.randn(LAYERS, 2, 2, G, T, D, generator=rng, dtype=torch.float64)
        for layer in range(LAYERS):
            outs = []
            for one in (own, some):
                one.write(layer, *kv[layer])
                how = {"mask": Causal(), "scale": SCALE}
                if window:
                    outs.append(one.attend_window(layer, q[layer], window=window, **how)[0])
                else:
                    outs.append(one.attend(layer, q[layer], **how)[0])
            torch.testing.assert_close(outs[1], outs[0], atol=1e-12, rtol=1e-12)
        own.commit(None, n_B)
        some.commit(None, n_B)
        assert some.len_B.tolist() == own.len_B.tolist()
    for new, old, mine in zip(
        (store.k_LBGSD, store.v_LBGSD), before, (own.k_LBGSD, own.v_LBGSD), strict=True
    ):
        assert torch.equal(new[:, [0, 2]], old[:, [0, 2]]) and torch.equal(new[:, [3, 1]], mine)
    assert store.len_B.tolist() == [0] * 4 and store.used == 0
