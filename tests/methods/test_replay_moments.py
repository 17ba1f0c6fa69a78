"""`ccvr=gaussian`: pooled moments, drawn features, and the retrained head against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.data.images.batches import epoch_batches
from fcl_bench.engine.codec import decoded, encoded
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.ccvr import CCVRHead, Moments, moments_message
from fcl_bench.protocol.context import WIRE_DTYPES, WireFormat
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Gaussian
from fcl_bench.training.network import Heads, Network, feature_start
from tests.methods.training_harness import CPU
from tests.methods.whole_runs import same


def pooled(parts, knobs: Gaussian, columns=(0, 1, 2), wire: str = "float64", form: str = "full") -> CCVRHead:
    """The server's side after the uploads of clients with these (features, labels), over the wire."""
    head = CCVRHead(knobs, parts[0][0].shape[1], CPU)
    for Z, labels in parts:
        message = moments_message(torch.from_numpy(Z), torch.from_numpy(labels), columns, knobs)
        columns_sent = "held" if form == "packed" else "task"
        sent = encoded(message, WireFormat(WIRE_DTYPES[wire], gram=form, columns=columns_sent))
        received = decoded(sent, torch.float64, CPU)
        assert head.objection(received, columns) == ""
        head.absorb(received, columns)
    return head


# The moments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("seed", range(4))
def test_the_pooled_moments_are_those_of_the_pooled_samples_for_any_partition(covariance, seed):
    rng = np.random.default_rng(seed)
    Z, labels = rng.standard_normal((60, 4)) @ rng.standard_normal((4, 4)) + 2, rng.integers(0, 3, 60)
    owner = rng.integers(0, 7, 60)  # some clients hold a single sample of a class
    parts = [(Z[owner == k], labels[owner == k]) for k in range(7)]
    head = pooled(parts, Gaussian(covariance, least=1))
    for column in range(3):
        own = Z[labels == column]
        expected = np.cov(own.T)
        found = head.known[column]
        assert found.count == len(own)
        np.testing.assert_allclose(found.mean.numpy(), own.mean(axis=0), atol=1e-12)
        wanted = expected if covariance == "full" else np.diag(expected)
        np.testing.assert_allclose(found.covariance.numpy(), wanted, atol=1e-11)


def test_it_is_the_pooled_gaussian_of_the_paper_and_no_mixture():
    """Luo et al.: S = sum_k (n_k - 1) S_k / (n - 1) + sum_k n_k m_k m_k' / (n - 1) - n m m' / (n - 1)."""
    rng = np.random.default_rng(5)
    parts = [
        (rng.standard_normal((n, 3)) + shift, np.zeros(n, dtype=np.int64)) for n, shift in ((5, 0), (9, 4), (2, -3))
    ]
    sizes, means = np.array([5, 9, 2]), np.stack([Z.mean(axis=0) for Z, _ in parts])
    n, mean = sizes.sum(), sizes @ means / sizes.sum()
    within = sum((size - 1) * np.cov(Z.T) for size, (Z, _) in zip(sizes, parts, strict=True))
    between = sum(size * np.outer(m, m) for size, m in zip(sizes, means, strict=True)) - n * np.outer(mean, mean)
    found = pooled(parts, Gaussian(), columns=(0,)).known[0]
    np.testing.assert_allclose(found.mean.numpy(), mean, atol=1e-12)
    np.testing.assert_allclose(found.covariance.numpy(), (within + between) / (n - 1), atol=1e-12)


def test_a_client_is_silent_of_classes_of_which_it_has_fewer_samples_than_asked():
    rng = np.random.default_rng(1)
    Z, labels = rng.standard_normal((6, 3)), np.array([0, 0, 0, 1, 2, 2])
    message = moments_message(torch.from_numpy(Z), torch.from_numpy(labels), (0, 1, 2), Gaussian())
    assert message["counts"].tolist() == [3, 0, 2]
    assert not message["sums"][:, 1].any()
    assert sorted(name for name in message if name.startswith("second")) == ["second.0", "second.2"]
    head = pooled([(Z, labels)], Gaussian())
    assert sorted(head.known) == [0, 2]
    assert sorted(pooled([(Z, labels)], Gaussian(least=3)).known) == [0]


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", ["full", "packed"])
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_moments_come_through_every_wire(wire, form, covariance):
    rng = np.random.default_rng(2)
    parts = [(rng.standard_normal((40, 5)).clip(0) + 0.2, np.arange(40) % 2) for _ in range(3)]
    exact = pooled(parts, Gaussian(covariance), (0, 1))
    found = pooled(parts, Gaussian(covariance), (0, 1), wire, form)
    close = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}[wire]
    for column in (0, 1):
        np.testing.assert_allclose(found.known[column].mean, exact.known[column].mean, atol=close)
        np.testing.assert_allclose(found.known[column].covariance, exact.known[column].covariance, atol=2 * close)
        assert torch.isfinite(found.known[column].draw(10, torch.Generator())).all()


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_drawn_features_have_the_moments(covariance):
    rng = np.random.default_rng(3)
    Z = rng.standard_normal((30, 3)) @ np.array([[2, 0, 0], [1, 1, 0], [0, 0.5, 0.1]]) + [1, -2, 0]
    known = pooled([(Z, np.zeros(30, dtype=np.int64))], Gaussian(covariance), (0,)).known[0]
    drawn = known.draw(200_000, torch.Generator().manual_seed(0)).numpy()
    expected = np.cov(Z.T) if covariance == "full" else np.diag(np.cov(Z.T).diagonal())
    np.testing.assert_allclose(drawn.mean(axis=0), Z.mean(axis=0), atol=0.03)
    np.testing.assert_allclose(np.cov(drawn.T), expected, atol=0.05)


def test_fewer_samples_than_features_draw_in_their_span_and_a_single_one_draws_itself():
    rng = np.random.default_rng(4)
    Z = rng.standard_normal((3, 8))
    known = pooled([(Z, np.zeros(3, dtype=np.int64))], Gaussian(), (0,)).known[0]
    drawn = known.draw(20, torch.Generator()).numpy() - Z.mean(axis=0)
    basis = np.linalg.qr((Z - Z.mean(axis=0))[:2].T)[0]
    np.testing.assert_allclose(drawn @ basis @ basis.T, drawn, atol=1e-6)
    alone = Moments(1, torch.from_numpy(Z[0]), torch.from_numpy(np.outer(Z[0], Z[0])))
    np.testing.assert_array_equal(alone.draw(2, torch.Generator()).numpy(), Z[[0, 0]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"second.1": None}, "it has samples of class 1 and no second moment of it"),
        ({"counts": torch.tensor([3, 0])}, "it has moments of class 1 and no sample of it"),
        ({"counts": torch.tensor([3, 1])}, "it tells of 1 samples of class 1, fewer than 2"),
    ],
)
def test_uploads_that_contradict_themselves_are_refused(change, said):
    Z, labels = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1])
    upload = dict(moments_message(Z, labels, (0, 1), Gaussian())) | change
    head = CCVRHead(Gaussian(), 3, CPU)
    assert head.objection(Message({name: value for name, value in upload.items() if value is not None}), (0, 1)) == said


# The head -------------------------------------------------------------------------------------------------------------


def network_of(sizes: list[int], dimension: int) -> Network:
    network = Network(feature_start(dimension))
    network.grow(sizes, 0)
    return network


def test_retraining_is_sgd_with_momentum_and_a_cosine_on_the_drawn_features():
    rng = np.random.default_rng(6)
    parts = [(rng.standard_normal((20, 4)) + np.arange(20)[:, None] % 3, np.arange(20) % 3)]
    knobs = Gaussian(samples=10, epochs=3, lr=0.1, batch_size=8)
    head, network = pooled(parts, knobs), network_of([2, 1], 4)
    before = {name: value.clone() for name, value in network.state().items()}
    head.retrain(network, Heads(((0, 1), (2,)), (2,)), seed=9)
    assert same(before, network.state())
    W = np.concatenate([before["heads.0.weight"], before["heads.1.weight"]]).astype(float)
    b, V, v = np.zeros(3), np.zeros((3, 4)), np.zeros(3)
    Z, y = (part.numpy() for part in head.draw(9))
    assert y.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    order = torch.Generator().manual_seed(10)
    batches = [batch.numpy() for _ in range(3) for batch in epoch_batches(30, 8, order)]
    for step, chosen in enumerate(batches):
        scores = Z[chosen] @ W.T + b
        P = np.exp(scores - scores.max(axis=1, keepdims=True))
        error = P / P.sum(axis=1, keepdims=True) - np.eye(3)[y[chosen]]
        V, v = 0.9 * V + error.T @ Z[chosen] / len(chosen), 0.9 * v + error.mean(axis=0)
        rate = 0.1 * (1 + np.cos(np.pi * step / len(batches))) / 2
        W, b = W - rate * V, b - rate * v
    np.testing.assert_allclose(head.weight.numpy(), W, atol=1e-5)
    np.testing.assert_allclose(head.bias.numpy(), b, atol=1e-5)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_without_variance_the_head_ranks_the_nearest_class_mean_first(covariance):
    """Each class is one point, four times: the samples drawn are the class means themselves."""
    rng = np.random.default_rng(7)
    means = 3 * np.eye(5, 6)
    Z, labels = np.repeat(means, 4, axis=0), np.repeat(np.arange(5), 4)
    head = pooled([(Z, labels)], Gaussian(covariance, epochs=20, lr=0.1), tuple(range(5)))
    drawn, places = head.draw(0)
    np.testing.assert_allclose(drawn.numpy(), means[places.numpy()], atol=1e-6)
    network = network_of([5], 6)
    head.retrain(network, Heads((tuple(range(5)),), tuple(range(5))), seed=0)
    near = means[rng.integers(0, 5, 300)] + 0.3 * rng.standard_normal((300, 6))
    nearest = ((near[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    scores = torch.from_numpy(near).float() @ head.weight.T + head.bias
    assert (scores.argmax(dim=1).numpy() == nearest).mean() > 0.98


def test_rows_of_classes_that_nobody_told_of_stay_as_they_were_trained():
    rng = np.random.default_rng(8)
    parts = [(rng.standard_normal((20, 4)), np.array([0, 2])[np.arange(20) % 2])]
    head, network = pooled(parts, Gaussian(lr=0.5)), network_of([3], 4)
    head.retrain(network, Heads(((0, 1, 2),), (0, 1, 2)), seed=1)
    moved = (head.weight != network.heads[0].weight).any(dim=1)
    assert moved.tolist() == [True, False, True]
    nobody = CCVRHead(Gaussian(), 4, CPU)
    nobody.retrain(network, Heads(((0, 1, 2),), (0, 1, 2)), seed=1)
    assert torch.equal(nobody.weight, network.heads[0].weight)


def test_a_step_size_that_diverges_is_told_with_its_key():
    rng = np.random.default_rng(9)
    parts = [(1e4 * rng.standard_normal((20, 4)), np.arange(20) % 3)]
    head = pooled(parts, Gaussian(lr=1e38))
    with pytest.raises(UserError, match=r"^method\.gaussian\.lr=1e\+38: retraining the heads diverged"):
        head.retrain(network_of([3], 4), Heads(((0, 1, 2),), (0, 1, 2)), seed=1)
