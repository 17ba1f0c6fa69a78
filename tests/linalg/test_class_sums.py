"""Class sums against the product with the one-hot matrix."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.linalg.gram import add_class_sums, class_sums


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "classes"), [(0, 3), (1, 1), (200, 7)])
def test_they_are_the_product_with_the_one_hot_matrix(n, classes, dtype):
    rng = torch.Generator().manual_seed(n)
    H = torch.randn(n, 12, generator=rng, dtype=dtype)
    which = torch.randint(0, classes, (n,), generator=rng)
    Y = torch.nn.functional.one_hot(which, classes).to(dtype)
    torch.testing.assert_close(class_sums(H, which, classes), H.T @ Y)


def test_they_add_to_what_is_there():
    H = torch.ones(4, 2)
    sums = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    add_class_sums(sums, H, torch.tensor([0, 2, 2, 2]))
    assert sums.tolist() == [[2.0, 3.0], [3.0, 4.0], [8.0, 9.0]]
