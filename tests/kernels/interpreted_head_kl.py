"""KL of laws by their logits: the kernel, interpreted, beside torch."""

import pytest
import torch

from longtrain.kernels import head_kl as module


@pytest.mark.parametrize(("rows", "vocab"), [(3, 97), (2, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_as_torch(rows, vocab, dtype, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    wide = torch.randn(2, rows, vocab + 3, generator=rng).mul(3).to(dtype)
    student, teacher = wide[0, :, :vocab], wide[1, :, :vocab]  # rows with a stride of their own
    teacher[0] = student[0]
    student[1, 4], student[1, 50] = 20, 20  # of equal ones the first counts
    teacher[1, 4] = 20
    weight = torch.rand(rows, generator=rng)
    reference, kept = student.clone(), student.clone()
    plain = module.head_kl(student, teacher, weight, gradient=False)
    assert torch.equal(student, kept)
    got = module.head_kl(student, teacher, weight, gradient=True)
    monkeypatch.setattr(module, "kernels_serve", lambda x: False)
    expected = module.head_kl(reference, teacher, weight, gradient=True)
    for one, other in ((got, expected), (plain, expected)):
        torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(one[1], other[1]) and one[1][:2].all()
    torch.testing.assert_close(student, reference, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-6)
