"""Autoencoders side by side against each alone in plain float64: equations, gradients, Adam, random streams."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fcl_bench.methods.autoencoders.fedcbc import FedCBC, VAETraining
from fcl_bench.methods.autoencoders.fitting import (
    Grouped,
    Wanted,
    fitted,
    fused,
    latents_of,
    posteriors,
)
from fcl_bench.methods.autoencoders.networks import (
    Architecture,
    Bank,
    decode,
    divergence,
    encode,
    further,
    keys,
    losses,
    normals,
    orders,
    uniforms,
)
from tests.training.class_vaes_oracle import (
    FIT,
    SMALL,
    plain_decoded,
    plain_fit,
    plain_fused,
    plain_kl,
    plain_loss,
    plain_parts,
    plain_posterior,
)

CLASSES = torch.tensor([2, 5, 9])


def start(columns: torch.Tensor = CLASSES, seed: int = 1) -> torch.Tensor:
    return SMALL.initial(keys(seed, columns))


def samples(counts: list[int], inputs: int = 5, seed: int = 0) -> Grouped:
    rows = np.random.default_rng(seed).random((sum(counts), inputs))
    return Grouped(torch.from_numpy(rows).float(), torch.tensor(counts))


# Sizes and equations --------------------------------------------------------------------------------------------------


def test_an_autoencoder_on_512_features_has_361728_numbers():
    """Encoder, mean and log-variance, decoder: 131,328 + 2 * 32,896 + 33,024 + 131,584."""
    published = Architecture(512, 256, 128)
    assert published.numbers == 361_728 == 131_328 + 2 * 32_896 + 33_024 + 131_584
    assert 4 * published.numbers == 1_446_912
    d, h, latent = 7, 4, 3
    assert Architecture(d, h, latent).numbers == 2 * d * h + 3 * h * latent + 2 * h + 2 * latent + d


def test_parts_are_views_and_lie_one_after_the_other():
    weights = start()
    parts = SMALL.parts(weights)
    assert torch.equal(torch.cat([part.flatten(1) for part in parts.values()], dim=1), weights)
    parts["mean.bias"].zero_()
    assert int((weights == 0).sum()) == 9


def test_new_weights_are_within_the_bounds_of_torchs_layers_and_fill_them():
    wide = Architecture(64, 50, 40)
    for name, part in wide.parts(wide.initial(keys(0, torch.arange(20)))).items():
        fan_in = wide.shapes[name.replace("bias", "weight")][1]
        assert float(part.abs().max()) <= fan_in**-0.5
        assert float(part.abs().max()) > 0.98 * fan_in**-0.5
        assert float(part.mean().abs()) < 0.1 * fan_in**-0.5


def test_the_divergence_by_hand():
    """m = 1, v = 0: 1/2. m = 0, v = log 4: (4 - 1 - log 4) / 2. From N(1, 1) to N(0, 4): log 2 + 2/8 - 1/2."""
    told = divergence(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [math.log(4)]]))
    np.testing.assert_allclose(told, [0.5, (3 - math.log(4)) / 2], rtol=1e-6)
    one, zero, four = torch.ones(1), torch.zeros(1), torch.full((1,), math.log(4))
    assert float(divergence(one, zero, zero, four)) == pytest.approx(math.log(2) + 2 / 8 - 0.5, rel=1e-6)
    rng = torch.Generator().manual_seed(0)
    m, v, m2, v2 = torch.randn(4, 6, 3, generator=rng)
    np.testing.assert_allclose(divergence(m, v, m2, v2), plain_kl(*(t.double() for t in (m, v, m2, v2))), rtol=1e-5)
    np.testing.assert_allclose(divergence(m, v, m, v), 0, atol=1e-6)
    zeros = torch.zeros_like(m)
    np.testing.assert_allclose(divergence(m, v), divergence(m, v, zeros, zeros), atol=1e-6)


@pytest.mark.parametrize("at_mean", [True, False])
def test_losses_are_those_of_each_autoencoder_alone(at_mean):
    weights, x = start(), torch.rand(3, 6, 5)
    noise = None if at_mean else normals(keys(3, CLASSES), 18).view(3, 6, 3)
    found, mean, log_variance = losses(SMALL.parts(weights), x, noise, 0.5)
    for c in range(3):
        own = None if noise is None else noise[c].double()
        for ours, theirs in zip(
            (found[c], mean[c], log_variance[c]),
            plain_loss(plain_parts(weights[c]), x[c].double(), own, 0.5),
            strict=True,
        ):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


# Random streams -------------------------------------------------------------------------------------------------------


def test_numbers_of_a_key_do_not_depend_on_the_others_nor_on_how_many_are_drawn():
    together = normals(keys(7, CLASSES), 11)
    for place, column in enumerate(CLASSES):
        assert torch.equal(normals(keys(7, column.unsqueeze(0)), 40)[0, :11], together[place])
    assert not torch.equal(normals(keys(8, CLASSES), 11), together)
    assert not torch.equal(normals(further(keys(7, CLASSES), 0), 11), together)


def test_normal_and_uniform_numbers_are_what_they_are_called():
    found = normals(keys(0, torch.arange(200)), 1001).double()
    assert float(found.mean()) == pytest.approx(0, abs=0.01)
    assert float(found.std()) == pytest.approx(1, abs=0.01)
    assert float((found**4).mean()) == pytest.approx(3, abs=0.06)
    # Neither the two of a pair, nor neighbours, nor neighbouring keys hang together.
    for a, b in ((found[:, :-1], found[:, 1:]), (found[:-1], found[1:])):
        assert abs(float((a * b).mean())) < 0.01
    flat = uniforms(keys(0, torch.arange(200)), 1000)
    assert 0 < float(flat.min()) < 1e-4
    assert 1 - 1e-4 < float(flat.max()) < 1
    np.testing.assert_allclose(torch.histc(flat, 10, 0, 1) / flat.numel(), 0.1, atol=0.003)


def test_orders_are_permutations_of_each_class_own_samples():
    counts = torch.tensor([4, 1, 7])
    found = orders(keys(0, CLASSES), counts)
    assert found.shape == (3, 7)
    for row, count in zip(found.tolist(), counts.tolist(), strict=True):
        assert sorted(row[:count]) == list(range(count))
        assert sorted(row) == list(range(7))
    alone = orders(keys(0, CLASSES[:1]), counts[:1])
    assert torch.equal(alone[0], found[0, :4])
    firsts = orders(keys(0, torch.arange(2000)), torch.full((2000,), 5))[:, 0]
    np.testing.assert_allclose(torch.bincount(firsts) / 2000, 0.2, atol=0.03)


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[4, 1, 7], [3, 3, 3], [2, 9, 2], [1, 1, 1]])
def test_training_side_by_side_is_torchs_adam_on_each_class_alone(counts):
    weights, given, streams = start(), samples(counts), keys(5, CLASSES)
    found = fitted(SMALL, weights, given, FIT, streams)
    for c, x in enumerate(given.inputs.split(counts)):
        expected = plain_fit(weights[c], x, streams[c : c + 1])
        np.testing.assert_allclose(found[c], expected, atol=2e-5)
        assert float((found[c] - weights[c]).abs().max()) > 0.01
    assert torch.equal(weights, start())


def test_posteriors_are_held_to_those_wanted_in_the_classes_that_have_any():
    counts = [4, 1, 7]
    given, streams = samples(counts), keys(5, CLASSES)
    mean, log_variance = posteriors(SMALL, start(seed=2), given)
    wanted = Wanted(mean, log_variance, torch.tensor([0.7, 0.0, 0.7]))
    found = fitted(SMALL, start(), given, FIT, streams, wanted)
    free = fitted(SMALL, start(), given, FIT, streams)
    assert torch.equal(found[1], free[1])
    first = 0
    for c, count in enumerate(counts):
        rows = slice(first, first + count)
        told = None if c == 1 else (0.7, mean[rows], log_variance[rows])
        expected = plain_fit(start()[c], given.inputs[rows], streams[c : c + 1], told)
        np.testing.assert_allclose(found[c], expected, atol=2e-5)
        first += count
    assert float((found[0] - free[0]).abs().max()) > 1e-3


def test_a_class_learns_the_same_whatever_classes_are_beside_it():
    """And in whatever order they lie."""
    counts, streams, weights = [6, 2, 11], keys(5, CLASSES), start()
    given = samples(counts)
    together = fitted(SMALL, weights, given, FIT, streams)
    pieces = given.inputs.split(counts)
    for c in range(3):
        alone = fitted(SMALL, weights[[c]], Grouped(pieces[c], torch.tensor([counts[c]])), FIT, streams[[c]])
        np.testing.assert_allclose(alone[0], together[c], atol=1e-6)
    turned = [2, 0, 1]
    again = Grouped(torch.cat([pieces[c] for c in turned]), torch.tensor([counts[c] for c in turned]))
    np.testing.assert_allclose(fitted(SMALL, weights[turned], again, FIT, streams[turned]), together[turned], atol=1e-6)


def test_posteriors_of_more_samples_than_fit_at_once():
    counts = [300, 1, 520]
    given = samples(counts)
    mean, log_variance = posteriors(SMALL, start(), given)
    for c, (x, m, v) in enumerate(
        zip(given.inputs.split(counts), mean.split(counts), log_variance.split(counts), strict=True)
    ):
        for ours, theirs in zip((m, v), plain_posterior(plain_parts(start()[c]), x.double()), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


# Drawing and fusing ---------------------------------------------------------------------------------------------------


def test_latents_are_of_the_prior():
    prior = latents_of(FedCBC(latent=8, samples=100), keys(0, torch.arange(50)))
    assert prior.shape == (50, 100, 8)
    assert float(prior.std()) == pytest.approx(1, abs=0.02)
    assert float(prior.abs().max()) > 3


def test_drawn_samples_are_what_the_decoder_makes():
    latents = latents_of(FIT, keys(0, CLASSES))
    made = decode(SMALL.parts(start()), latents)
    for c in range(3):
        np.testing.assert_allclose(made[c], plain_decoded(plain_parts(start()[c]), latents[c].double()), atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_fusing_is_what_the_equations_say(alpha):
    """Four classes of 2, 1, 3 and 2 teachers; the last class was known before."""
    columns = torch.tensor([1, 4, 6, 7])
    counts, known = torch.tensor([2, 1, 3, 2]), torch.tensor([False, False, False, True])
    # With this seed the teacher drawn at random is the first, the second or a middle one, and never the last known.
    teachers, streams = SMALL.initial(keys(3, torch.arange(8))), keys(12, columns)
    method = replace(FIT, alpha=alpha)
    found = fused(SMALL, teachers, counts, known, method, streams)
    assert torch.equal(found[1], teachers[2])
    for c, (first, last) in enumerate([(0, 2), (2, 3), (3, 6), (6, 8)]):
        if c != 1:
            expected = plain_fused(teachers[first:last], streams[c : c + 1], bool(known[c]), method)
            np.testing.assert_allclose(found[c], expected, atol=3e-5)


def test_a_class_is_fused_the_same_whatever_classes_are_beside_it():
    teachers, streams = SMALL.initial(keys(3, torch.arange(5))), keys(9, CLASSES)
    counts, known = torch.tensor([2, 1, 2]), torch.zeros(3, dtype=torch.bool)
    together = fused(SMALL, teachers, counts, known, FIT, streams)
    alone = fused(SMALL, teachers[3:], counts[2:], known[2:], FIT, streams[2:])
    np.testing.assert_allclose(alone[0], together[2], atol=1e-6)


def test_a_bank_has_its_classes_ascending_and_changes_nothing_in_place():
    bank = Bank.empty(2, torch.device("cpu")).updated(torch.tensor([7, 3]), torch.tensor([[7.0, 7], [3, 3]]))
    assert bank.columns.tolist() == [3, 7]
    more = bank.updated(torch.tensor([5, 7]), torch.tensor([[5.0, 5], [8, 8]]))
    assert more.columns.tolist() == [3, 5, 7]
    assert more.weights[:, 0].tolist() == [3, 5, 8]
    assert bank.weights[:, 0].tolist() == [3, 7]
    assert more.has(torch.tensor([1, 5, 9])).tolist() == [False, True, False]
    assert more.at(torch.tensor([7, 3]))[:, 1].tolist() == [8, 3]


@pytest.mark.slow
def test_one_autoencoder_learns_to_reconstruct_its_class():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(0.5 + 0.3 * np.tanh(rng.standard_normal((60, 2)) @ rng.standard_normal((2, 8)))).float()
    architecture, key = Architecture(8, 16, 2), keys(0, torch.zeros(1))
    fit = FedCBC(VAETraining(epochs=150, batch_size=16, lr=0.01, weight_decay=0.0), 16, 2, kl=0.01)
    weights = fitted(architecture, architecture.initial(key), Grouped(x, torch.tensor([60])), fit, key)
    parts = architecture.parts(weights)
    apart = (decode(parts, encode(parts, x[None])[0])[0] - x).square().sum(dim=1).mean()
    assert float(apart) < 0.3 * float((x - x.mean(dim=0)).square().sum(dim=1).mean())
