"""FedGen's generator: its form, what it is taught by, and how its optimiser and its classes go on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.data_free.fedgen import shares, teaching_loss
from fcl_bench.methods.data_free.generators.features import FeatureGenerator, KeptAdam, similarity
from fcl_bench.training.network import Heads
from tests.methods import fedgen_oracle as oracle
from tests.methods.fedgen_harness import made_generator, plain
from tests.methods.whole_runs import same

#: Of the logits that compete: all of one head.
PLAIN = (None, None)


# The server's loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_the_generator_is_two_linear_layers_on_the_class_and_noise(mode):
    generator, rng = made_generator(), np.random.default_rng(0)
    generator.norm.running_mean.copy_(torch.from_numpy(rng.standard_normal(7)))
    generator.norm.running_var.copy_(torch.from_numpy(rng.uniform(0.5, 2, 7)))
    labels, noise = rng.integers(0, 5, 9), rng.standard_normal((9, 3))
    expected = oracle.generate(plain(generator), labels, noise, mode)
    found = generator.train(mode)(torch.from_numpy(labels), torch.from_numpy(noise))
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-12)


def hand_heads() -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Two clients of three classes; the first knows nothing of class 2, the second nothing of class 0."""
    first = np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.5]]), np.array([0.1, 0.0, -0.2])
    second = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, -1.0]]), np.array([0.0, 0.3, 0.0])
    return [first, second], np.array([[4, 1, 0], [0, 3, 2]])


def test_the_teaching_loss_and_its_gradient_are_those_of_the_equation_on_two_hand_heads():
    heads, counts = hand_heads()
    G, labels = np.array([[0.5, -1.0], [2.0, 0.3], [-0.7, 0.9], [0.0, 0.0]]), np.array([0, 1, 2, 1])
    expected, gradient = oracle.teaching(G, labels, heads, counts)
    made = torch.from_numpy(G).requires_grad_()
    weights, biases = (torch.from_numpy(np.stack([head[i] for head in heads])) for i in (0, 1))
    omega = shares(torch.from_numpy(counts))
    loss = teaching_loss(made, torch.from_numpy(labels), weights, biases, omega, PLAIN)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(made.grad.numpy(), gradient, atol=1e-12)
    # Class 0 is the first client's alone, whose first row says (1, 0): by hand.
    p = np.exp([0.5 + 0.1, -2.0, -0.5 - 0.5 - 0.2])
    by_hand = -np.log(p[0] / p.sum())
    alone = teaching_loss(made[:1], torch.tensor([0]), weights, biases, omega, PLAIN)
    assert alone.item() == pytest.approx(by_hand, abs=1e-12)


def test_the_teaching_gradient_is_that_of_finite_differences():
    heads, counts = hand_heads()
    labels, step = np.array([2, 1, 0]), 1e-6
    G = np.random.default_rng(1).standard_normal((3, 2))
    _, gradient = oracle.teaching(G, labels, heads, counts)
    weights, biases = (torch.from_numpy(np.stack([head[i] for head in heads])) for i in (0, 1))
    omega = shares(torch.from_numpy(counts))

    def at(moved: np.ndarray) -> float:
        return teaching_loss(torch.from_numpy(moved), torch.from_numpy(labels), weights, biases, omega, PLAIN).item()

    for place in np.ndindex(G.shape):
        nudge = np.zeros_like(G)
        nudge[place] = step
        assert (at(G + nudge) - at(G - nudge)) / (2 * step) == pytest.approx(gradient[place], abs=1e-8)


def test_only_logits_that_compete_teach():
    """Two heads of two classes each; over the task's, the second head alone has a say."""
    rng = np.random.default_rng(2)
    W, b, made = rng.standard_normal((3, 4, 5)), rng.standard_normal((3, 4)), rng.standard_normal((6, 5))
    labels, counts = rng.integers(2, 4, 6), rng.integers(1, 9, (3, 2))
    own = [(W[k, 2:], b[k, 2:]) for k in range(3)]
    expected, _ = oracle.teaching(made, labels - 2, own, counts)
    omega = torch.zeros(3, 4, dtype=torch.float64)
    omega[:, 2:] = shares(torch.from_numpy(counts))
    competition = Heads(((0, 1), (2, 3)), (2, 3)).competition("task")
    arrays = [torch.from_numpy(array) for array in (made, labels, W, b)]
    assert teaching_loss(*arrays, omega, competition).item() == pytest.approx(expected, abs=1e-12)


def test_each_classes_shares_sum_to_one_and_absent_classes_have_none():
    held = torch.tensor([[3, 0, 0, 7], [1, 5, 0, 0], [0, 5, 0, 0]])
    omega = shares(held)
    torch.testing.assert_close(omega.sum(dim=0), torch.tensor([1.0, 1.0, 0.0, 1.0]).double())
    assert omega[0].tolist() == [0.75, 0.0, 0.0, 1.0]


def test_the_diversity_is_that_of_the_equation_and_one_only_without_any():
    rng = np.random.default_rng(3)
    noise, made = rng.standard_normal((7, 3)), rng.standard_normal((7, 5))

    def found(noise, made):
        return similarity(torch.from_numpy(noise), torch.from_numpy(made)).item()

    assert found(noise, made) == pytest.approx(oracle.diversity(noise, made), abs=1e-14)
    assert 0 < found(noise, 10 * made) < found(noise, made) < 1
    assert found(np.repeat(noise[:1], 7, axis=0), made) == 1
    assert found(noise, np.repeat(made[:1], 7, axis=0)) == 1
    # By hand: a mean square of (1 + 9) / 2, a mean distance of 3, in two of four pairs.
    assert found(np.array([[0.0, 0.0], [1.0, 3.0]]), np.array([[1.0], [4.0]])) == pytest.approx(np.exp(-7.5))


def test_one_clients_head_alone_teaches_the_generator_its_classes():
    """L_teach by itself drives argmax(W G(y, eps)) to y, whatever the noise."""
    torch.manual_seed(0)
    generator = FeatureGenerator(6, 16, 4, seed=1)
    generator.grow(4)
    W, b, omega = torch.randn(1, 4, 6), torch.zeros(1, 4), torch.ones(1, 4)
    labels = torch.arange(4).repeat(16)

    def right() -> float:
        generator.eval()
        with torch.no_grad():
            made, _ = generator.draw(labels)
        generator.train()
        return ((made @ W[0].T).argmax(dim=1) == labels).float().mean().item()

    before, adam = right(), KeptAdam()
    for _ in range(6):
        optimiser = adam.begin(generator, 0.01, 0.0)
        for _ in range(25):
            made, _ = generator.draw(labels)
            optimiser.zero_grad()
            teaching_loss(made, labels, W, b, omega, PLAIN).backward()
            optimiser.step()
        adam.keep(generator, optimiser)
    assert before < 0.6
    assert right() == 1


# Adam and growth ------------------------------------------------------------------------------------------------------


def test_adam_goes_on_across_rounds_as_one_optimiser_would():
    def steps(rounds: list[int]) -> dict[str, torch.Tensor]:
        generator, adam = made_generator(), KeptAdam()
        draws = torch.Generator().manual_seed(5)
        for count in rounds:
            resumed = KeptAdam()
            resumed.load_state_dict({name: value.clone() for name, value in adam.state_dict().items()})
            optimiser = resumed.begin(generator, 0.01, 0.1)
            for _ in range(count):
                optimiser.zero_grad()
                noise = torch.randn(6, 3, generator=draws, dtype=torch.float64)
                generator(torch.arange(6) % 5, noise).square().sum().backward()
                optimiser.step()
            resumed.keep(generator, optimiser)
            adam = resumed
        return generator.state()

    assert same(steps([6]), steps([2, 3, 1]))
    assert not same(steps([6]), steps([5]))


def test_new_classes_leave_old_rows_and_their_moments_as_they_were():
    generator, adam = made_generator(classes=2), KeptAdam()
    optimiser = adam.begin(generator, 0.01, 0.0)
    generator(torch.tensor([0, 1, 1]), torch.ones(3, 3, dtype=torch.float64)).sum().backward()
    optimiser.step()
    adam.keep(generator, optimiser)
    rows, moments = generator.classes.detach().clone(), adam.state_dict()["classes.exp_avg"].clone()
    generator.grow(5)
    assert generator.classes.shape == (5, 7)
    assert torch.equal(generator.classes[:2], rows)
    assert len({tuple(row.tolist()) for row in generator.classes}) == 5
    again = adam.begin(generator, 0.01, 0.0).state[generator.classes]
    assert torch.equal(again["exp_avg"], torch.cat([moments, torch.zeros(3, 7, dtype=torch.float64)]))
