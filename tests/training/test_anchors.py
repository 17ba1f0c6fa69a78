"""Anchors: random ones, those of a file, the ball around them, and the network's mapping to their space."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fcl_bench.errors import UserError
from fcl_bench.methods.data_free.generators.anchored import MappedNetwork, outside, random_anchors, read_anchors
from tests.methods.training_harness import tiny_context


def test_random_anchors_are_orthogonal_and_of_one_length():
    anchors = random_anchors(range(6), 8, seed=3).double()
    assert anchors.dtype == torch.float64
    # 0.2 sqrt(8) = 0.565685, its square 0.32
    np.testing.assert_allclose((anchors @ anchors.T).numpy(), 0.32 * np.eye(6), atol=1e-7)
    # Two of them are 2 * 0.04 apart as a mean over entries, far outside of a ball of 0.015.
    assert float((anchors[0] - anchors[1]).square().mean()) == pytest.approx(0.08)


def test_anchors_are_the_same_whichever_classes_came_together():
    """More classes than dimensions make a second frame: orthogonal within, not to the first."""
    whole = random_anchors(range(11), 4, seed=3)
    parts = [random_anchors(columns, 4, seed=3) for columns in (range(3), range(3, 9), range(9, 9), range(9, 11))]
    assert torch.equal(whole, torch.cat(parts))
    products = (whole @ whole.T / 0.16).double()
    for block in (slice(0, 4), slice(4, 8)):
        np.testing.assert_allclose(products[block, block].numpy(), np.eye(4), atol=1e-6)
    assert float(products[:4, 4:8].abs().max()) > 0.1
    assert not torch.equal(random_anchors(range(3), 4, seed=4), whole[:3])


def test_random_anchors_are_uniform_directions():
    """Also their signs: without the sign of R's diagonal, LAPACK's first entries of Q would all be negative."""
    first = torch.stack([random_anchors(range(1), 3, seed)[0] for seed in range(400)])
    assert float(first.mean(dim=0).abs().max()) < 5 * 0.2 / math.sqrt(400)


def test_the_ball():
    """mse((1, 2), (0, 0)) = 2.5; a mean over samples and entries, so a far sample outweighs near ones."""
    point, anchor = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.zeros(1, 2)
    value = outside(point, anchor, 2.0)
    assert float(value.detach()) == pytest.approx(0.5)
    value.backward()
    assert point.grad.tolist() == [[1.0, 2.0]]
    two = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    assert float(outside(two, torch.zeros(2, 2), 1.0)) == pytest.approx(0.25)


def test_inside_of_the_ball_there_is_neither_loss_nor_gradient():
    point = torch.tensor([[0.3, 0.4]], requires_grad=True)
    value = outside(point, torch.zeros(1, 2), 0.2)
    value.backward()
    assert float(value.detach()) == 0
    assert not point.grad.any()


def test_the_mapping_belongs_to_the_network():
    context = tiny_context()
    network, again = (MappedNetwork(context.network, 6, seed=5) for _ in range(2))
    assert {"mapping.weight", "mapping.bias"} <= network.state().keys()
    assert {"mapping.weight", "mapping.bias"} <= network.changing().keys()
    assert network.mapping.weight.shape == (6, 32)
    assert torch.equal(network.mapping.weight, again.mapping.weight)
    assert not torch.equal(network.mapping.weight, MappedNetwork(context.network, 6, seed=6).mapping.weight)


# Files ----------------------------------------------------------------------------------------------------------------

ROWS = torch.arange(36, dtype=torch.float32).view(12, 3)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_file_holds_a_matrix(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "npz":
        np.savez(path, anchors=ROWS.numpy())
    else:
        save_file({"anchors": ROWS}, path)
    assert torch.equal(read_anchors(str(path), "method.anchors"), ROWS)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"anchors": ROWS.long()}, "holds no matrix of finite numbers: anchors (12, 3)"),
        ({"anchors": ROWS / 0}, "holds no matrix of finite numbers"),
        ({"anchors": ROWS[0]}, "holds no matrix of finite numbers: anchors (3,)"),
        ({"a": ROWS[0], "b": ROWS[0, :2]}, "holds no matrix of finite numbers: a (3,), b (2,)"),
        ({}, "holds no matrix of finite numbers: nothing"),
    ],
)
def test_a_file_that_holds_something_else_is_told_in_one_line(tmp_path, tensors, told):
    path = tmp_path / "odd.npz"
    np.savez(path, **{key: value.numpy() for key, value in tensors.items()})
    with pytest.raises(UserError) as raised:
        read_anchors(str(path), "method.anchors")
    assert str(raised.value).startswith(f"method.anchors={path} ")
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("missing.npz", None, "does not exist"),
        ("words.txt", b"1 2 3", "is no file of anchors"),
        ("broken.npz", b"no archive", "can't be read"),
        ("cut.npz", b"PK\x03\x04 no archive", "can't be read"),
        ("broken.safetensors", b"nothing", "can't be read"),
    ],
)
def test_what_is_no_file_of_anchors_is_told_in_one_line(tmp_path, name, content, told):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"method\.anchors=.*{told}.*\(random, or a \.npz") as raised:
        read_anchors(str(path), "method.anchors")
    assert "\n" not in str(raised.value)


def test_pickled_objects_in_a_file_are_not_run(tmp_path):
    path = tmp_path / "pickled.npz"
    np.savez(path, anchors=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UserError, match="can't be read"):
        read_anchors(str(path), "method.anchors")
