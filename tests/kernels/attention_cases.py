"""Inputs of the tree and hierarchical attention tests."""

import torch

from longtrain.kernels.hierarchical import layout as hier_layout
from longtrain.kernels.tree_attention import CAUSAL, tree_bits


def forest(B, N):
    """A random forest's mask: each node sees itself and its ancestors; parents come before children."""
    visible_BNN = torch.zeros(B, N, N, dtype=torch.bool)
    for tree in visible_BNN:
        for i in range(N):
            parent = int(torch.randint(-1, i, ()))
            if parent >= 0:
                tree[i] = tree[parent]
            tree[i, i] = True
    return visible_BNN


def mask_named(name, B, T, device="cpu", nodes=None):
    """What `tree_attention` takes, and the same as visible_BTN: of the last T of so many nodes."""
    if name == "none":
        return None, torch.zeros(B, T, T, dtype=torch.bool)
    if name == "causal":
        return CAUSAL, torch.ones(B, T, T, dtype=torch.bool).tril()
    visible_BTT = forest(B, nodes or T)[:, -T:]
    return tree_bits(visible_BTT).to(device), visible_BTT


def dense_case(
    *, B=1, H=4, G=2, T=3, D=16, S=40, lens=(20,), base=0, dtype=torch.float32, device="cpu", nodes=None
):
    """q, and K and V as views of a larger tensor with slots before heads; NaN where nothing may be read."""
    q_BHTD = torch.randn(B, H, T, D).to(dtype)
    k_BGSD, v_BGSD = torch.randn(2, B, S, G, D).to(dtype).transpose(2, 3).unbind(0)
    for b, n in enumerate(lens):
        for x in (k_BGSD, v_BGSD):
            x[b, :, base + n + (nodes or T) :] = float("nan")
    return (x.to(device) for x in (q_BHTD, k_BGSD, v_BGSD, torch.tensor(lens)))


def per_head_case(lens, *, T=3, H=4, D=16, dtype=torch.float32, device="cpu", nodes=None):
    """q, and K and V of heads of these lengths in one buffer: first its places, then the arguments.

    NaN lies between heads, where nothing may be read, and heads are not in order.
    """
    B, G, room = len(lens), len(lens[0]), nodes or T
    size_X = torch.tensor(lens).flatten() + room + 3
    order_X = torch.randperm(B * G)
    first_X = torch.zeros(B * G, dtype=torch.int64)
    first_X[order_X] = size_X[order_X].cumsum(0) - size_X[order_X]
    k_SD, v_SD = torch.randn(2, int(size_X.sum()), D).to(dtype).unbind(0)
    for first, size in zip(first_X.tolist(), size_X.tolist(), strict=True):
        for x in (k_SD, v_SD):
            x[first + size - 3 : first + size] = float("nan")
    q_BHTD, len_BG, first_BG = torch.randn(B, H, T, D).to(dtype), torch.tensor(lens), first_X.view(B, G)
    k_BGSD, v_BGSD = (x.to(device).expand(B, G, -1, -1) for x in (k_SD, v_SD))
    return q_BHTD.to(device), k_BGSD, v_BGSD, len_BG.to(device), first_BG.to(device)


def heads_alone(q_BHTD, k_BGSD, v_BGSD, len_BG, first_BG, nodes):
    """For each sequence and KV head its inputs as a batch of one sequence with one head."""
    group = q_BHTD.shape[1] // k_BGSD.shape[1]
    for b, lens in enumerate(len_BG.tolist()):
        for g, n in enumerate(lens):
            rows = slice(int(first_BG[b, g]), int(first_BG[b, g]) + n + nodes)
            heads = slice(g * group, (g + 1) * group)
            k, v = (x[b, g, rows][None, None] for x in (k_BGSD, v_BGSD))
            yield b, heads, (q_BHTD[b : b + 1, heads], k, v, torch.tensor([n], device=k.device))


def grown(widths):
    """visible_NN of a tree as drafts grow it: each level's nodes below random nodes of the level above."""
    parents, above = [-1], [0]
    for width in widths:
        chosen = torch.randint(len(above), (width,)).sort().values
        first = len(parents)
        parents += [above[int(i)] for i in chosen]
        above = list(range(first, first + width))
    visible_NN = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        visible_NN[node] |= visible_NN[parent]
    return visible_NN


def rows_alone(q_BHTD, k_BGSD, v_BGSD, len_B, visible_BTT):
    """For each row of a step, its inputs in plain decoding: what it sees lies at the end of the prefix."""
    for row in range(q_BHTD.shape[2]):
        k_own, v_own, before_B = k_BGSD.clone(), v_BGSD.clone(), len_B.clone()
        for b, n in enumerate(len_B.tolist()):
            seen = visible_BTT[b, row].nonzero()[:, 0].tolist()
            for x, own in ((k_BGSD, k_own), (v_BGSD, v_own)):
                own[b, :, n:] = float("nan")
                own[b, :, n : n + len(seen)] = x[b][:, [n + node for node in seen]]
            before_B[b] += len(seen) - 1
        yield q_BHTD[:, :, row : row + 1], k_own, v_own, before_B


def hier_case(
    *, split, B=1, H=4, G=2, T=3, D=64, blocks=(2,), recent=(140,), dtype=torch.float32, device="cpu"
):
    """q, random planes (one block more than used), ring and lengths; NaN where nothing may be read."""
    planes = hier_layout.new_planes(
        n_layers=2, batch=B, n_kv_heads=G, blocks=max(blocks) + 1, head_dim=D, split=split, device=device
    ).layer(1)
    for name in ("k_upper", "k_lower", "v_upper", "v_lower"):
        getattr(planes, name).random_(0, 256)
    for name in ("k_step", "v_step"):
        getattr(planes, name).uniform_(0.01, 0.3)
    for name in ("k_zero", "v_zero"):
        getattr(planes, name).uniform_(-4, 2)
    ring = hier_layout.new_ring(
        n_layers=2, batch=B, n_kv_heads=G, head_dim=D, device=device, dtype=dtype
    ).layer(1)
    ring.k.normal_()
    ring.v.normal_()
    for b, n in enumerate(blocks):
        for name in ("k_step", "k_zero", "v_step", "v_zero"):
            getattr(planes, name)[b, :, n:] = float("nan")
        for position in range(n * 128 + recent[b] + T, n * 128 + 384):
            ring.k[b, :, position % 384] = float("nan")
            ring.v[b, :, position % 384] = float("nan")
    lens = hier_layout.Lens(
        torch.tensor([n * 128 + r for n, r in zip(blocks, recent, strict=True)], device=device),
        torch.tensor(blocks, device=device),
    )
    return torch.randn(B, H, T, D, device=device).to(dtype), planes, ring, lens


def distance(got, expected):
    """Norm of the difference over the norm of what is wanted."""
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
