"""Sums of squared gradients: by hand, against plain loops, and in bounded memory."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fcl_bench.backbones.backbone import Trainable, copies
from fcl_bench.backbones.timm_backbone import Timm, Transform
from fcl_bench.data.images.batches import Standardise
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, image_split
from fcl_bench.methods.averaging import fedewc
from fcl_bench.methods.averaging.fedewc import summed_squares
from fcl_bench.training.network import Network, feature_start
from fcl_bench.training.trainer import rows
from tests.methods.classical_oracle import fisher_sum
from tests.methods.plain_training import resnet_context
from tests.methods.training_harness import tiny_context


def sums(network, names, samples, labels, competing=None, standardise=rows):
    return summed_squares(network, names, samples, labels, competing=competing, standardise=standardise)


def trained(network: Network) -> list[str]:
    return [name for name, value in network.named_parameters() if value.requires_grad]


def linear(inputs: int, sizes: list[int]) -> Network:
    network = Network(feature_start(inputs))
    network.grow(sizes, seed=3)
    return network


def one_way(monkeypatch, way: str) -> None:
    """Whether heads are differentiated as any parameter is."""
    if way == "general":
        monkeypatch.setattr(fedewc, "_of_heads", fedewc._of_network)


@pytest.mark.parametrize("way", ["outer products", "general"])
def test_a_logistic_unit_by_hand(way, monkeypatch):
    """p = sigma(w x); one sample's square is (y - p)^2 x^2."""
    one_way(monkeypatch, way)
    network = linear(1, [2])
    network.load({"heads.0.weight": torch.tensor([[0.0], [0.7]])})
    x, y = np.array([1.5, -0.4, 3.0]), np.array([1, 1, 0])
    p = 1 / (1 + np.exp(-0.7 * x))
    found = sums(network, ["heads.0.weight"], torch.from_numpy(x[:, None]), torch.from_numpy(y))
    expected = (y - p) ** 2 * x**2
    np.testing.assert_allclose(found["heads.0.weight"].numpy(), [[expected.sum()]] * 2, rtol=1e-5)


@pytest.mark.parametrize("way", ["outer products", "general"])
@pytest.mark.parametrize("competing", [None, [1, 2, 4]])
def test_heads_are_as_written_down(way, competing, monkeypatch):
    one_way(monkeypatch, way)
    network, rng = linear(6, [3, 0, 2]), np.random.default_rng(0)
    Z, chosen = rng.standard_normal((70, 6)), np.arange(5) if competing is None else np.array(competing)
    labels = chosen[rng.integers(0, len(chosen), 70)]
    A = np.hstack([network.logits(torch.eye(6)).detach().numpy().T, np.zeros((5, 1))])
    expected = fisher_sum(np.hstack([Z, np.ones((70, 1))]), labels, A, chosen)
    place = torch.from_numpy(np.searchsorted(chosen, labels))
    logits = None if competing is None else torch.tensor(competing)
    found = sums(network, trained(network), torch.from_numpy(Z), place, logits)
    assert list(found) == trained(network)
    weights = torch.cat([found[f"heads.{h}.weight"] for h in range(3)]).numpy()
    biases = torch.cat([found[f"heads.{h}.bias"] for h in range(3)]).numpy()
    np.testing.assert_allclose(np.hstack([weights, biases[:, None]]), expected, rtol=2e-4, atol=1e-7)


class Body(nn.Module):
    def __init__(self, weight, scale, mean, variance):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5)
        own = {"linear.weight": weight, "norm.weight": scale, "norm.running_mean": mean, "norm.running_var": variance}
        self.load_state_dict({**self.state_dict(), **{name: torch.from_numpy(v) for name, v in own.items()}})

    def forward(self, x):
        return self.norm(self.linear(x)).relu()


def test_a_body_with_batch_norm_is_back_propagated_by_hand():
    """Running statistics serve, whatever the batch; gradients by the chain rule in NumPy, sample by sample."""
    rng = np.random.default_rng(1)
    V, scale, mean = rng.standard_normal((5, 4)), rng.uniform(0.5, 2, 5), rng.standard_normal(5)
    variance = rng.uniform(0.5, 2, 5)
    body = Body(V, scale, mean, variance)
    network = Network(Trainable("made", copies(body), 5, 0, (0,) * 3, (1,) * 3, (), {}))
    network.grow([3], seed=2)
    A = network.heads[0].weight.detach().double().numpy()
    X, labels = rng.standard_normal((50, 4)), rng.integers(0, 3, 50)
    expected = {"body.linear.weight": np.zeros((5, 4)), "body.norm.weight": np.zeros(5), "heads.0.weight": 0 * A}
    for x, label in zip(X, labels, strict=True):
        normed = (V @ x - mean) / np.sqrt(variance + 1e-5)
        z = np.maximum(scale * normed, 0)
        p = np.exp(A @ z) / np.exp(A @ z).sum()
        g = (np.arange(3) == label) - p
        inner = (A.T @ g) * (z > 0)
        expected["heads.0.weight"] += np.outer(g, z) ** 2
        expected["body.norm.weight"] += (inner * normed) ** 2
        expected["body.linear.weight"] += np.outer(inner * scale / np.sqrt(variance + 1e-5), x) ** 2
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = sums(network, list(expected), torch.from_numpy(X), torch.from_numpy(labels))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].numpy(), value, rtol=1e-3, atol=1e-5, err_msg=name)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(value.grad is None for value in network.parameters())


def transformer() -> Network:
    blank = image_split([0, 1], ArrayImages(np.zeros((2, 16, 16, 3), dtype=np.uint8)))
    look = Transform(size=32, crop_pct=1.0, mean=[0.5] * 3, std=[0.25] * 3)
    return Network(Timm("test_vit", pretrained=False, transform=look).trainable(Dataset("made", blank, blank), seed=1))


NETWORKS = {
    "tiny": lambda: Network(tiny_context().network),
    "resnet": lambda: Network(resnet_context().network),
    "transformer": transformer,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_real_networks_are_as_a_loop_over_samples(name):
    network = NETWORKS[name]().to(memory_format=torch.channels_last)
    network.grow([2, 2], seed=0)
    size = {"tiny": 8, "resnet": 16, "transformer": 32}[name]
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (7, 3, size, size)).astype(np.uint8))
    labels, names = torch.from_numpy(rng.integers(0, 2, 7)), trained(network)
    standardise = Standardise(size, (0.5,) * 3, (0.25,) * 3)
    found = sums(network, names, images, labels, competing=torch.tensor([2, 3]), standardise=standardise)
    network.eval()
    own = dict(network.named_parameters())
    expected = {key: torch.zeros_like(own[key], dtype=torch.float64) for key in names}
    for image, label in zip(images, labels, strict=True):
        loss = nn.functional.cross_entropy(network(standardise(image[None]))[:, 2:], label[None])
        for key, value in zip(names, torch.autograd.grad(loss, [own[key] for key in names]), strict=True):
            expected[key] += value.double().square()
    for key in names:
        scale = float(expected[key].max())
        np.testing.assert_allclose(found[key].numpy(), expected[key].numpy(), rtol=1e-3, atol=1e-5 * scale, err_msg=key)


def context_with_images(count: int):
    network, rng = Network(tiny_context().network), np.random.default_rng(0)
    network.grow([4], seed=0)
    images = torch.from_numpy(rng.integers(0, 256, (count, 3, 8, 8)).astype(np.uint8))
    return network, images, torch.from_numpy(rng.integers(0, 4, count)), Standardise(8, (0.5,) * 3, (0.25,) * 3)


def test_the_size_of_the_batches_does_not_matter(monkeypatch):
    network, images, labels, standardise = context_with_images(9)
    found = []
    for most in (1, 4, 100):
        monkeypatch.setitem(fedewc.HELD_SAMPLES, "cpu", most)
        found.append(sums(network, trained(network), images, labels, standardise=standardise))
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-8)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation returned."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        sizes = [value.nbytes for value in tree_leaves(returned) if isinstance(value, torch.Tensor)]
        self.most = max([self.most, *sizes])
        return returned


def test_no_more_gradients_are_held_than_allowed(monkeypatch):
    """A wide layer, whose samples' gradients outweigh all else: no tensor is larger than a chunk of them."""
    body = nn.Sequential(OrderedDict(linear=nn.Linear(100, 50)))
    network = Network(Trainable("made", copies(body), 50, 0, (0,) * 3, (1,) * 3, (), {}))
    network.grow([2], seed=0)
    X, labels = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2
    each = 4 * sum(value.numel() for value in network.parameters())
    held = {}
    for allowed in (2, 8, 32):
        monkeypatch.setitem(fedewc.HELD_BYTES, "cpu", allowed * each)
        with Largest() as seen:
            sums(network, trained(network), X, labels)
        held[allowed] = seen.most
    assert all(most <= max(allowed * each, X.nbytes) for allowed, most in held.items())
    assert held[32] > 10 * held[2]
    monkeypatch.setitem(fedewc.HELD_BYTES, "cpu", 1)
    assert fedewc.chunk_size(list(network.parameters()), X.device) == 1
