"""Merges one after the other against NumPy's SVD of everything side by side, and what a merge need not compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.linalg import spectral
from fcl_bench.linalg.spectral import Spectrum, summarise
from fcl_bench.methods.closed_form.algebra import merging
from fcl_bench.methods.closed_form.algebra.merging import Losses, Merger, Part, merge


def sketch(seed: int, rank: int, M: int = 60, smallest: float = 1e-2) -> Spectrum:
    """Orthonormal directions at random, singular values from 1 down to `smallest`."""
    rng = np.random.default_rng(seed)
    V = np.linalg.qr(rng.standard_normal((M, rank)))[0]
    return Spectrum(torch.from_numpy(V), torch.from_numpy(np.geomspace(1.0, smallest, rank)))


def rounded(one: Spectrum) -> Spectrum:
    """As it comes over a wire in float32."""
    return Spectrum(one.V.float().double(), one.sigma.float().double())


def factor(one: Spectrum) -> np.ndarray:
    return (one.V * one.sigma).numpy()


def paper(parts: list[Spectrum], rank: int) -> np.ndarray:
    """Eq. 16-19 in turn: A = [V_a S_a, V_b S_b], its r leading left singular vectors and values; V diag(s^2) V'."""
    A = np.zeros((60, 0))
    for part in parts:
        U, S, _ = np.linalg.svd(np.concatenate([A, factor(part)], axis=1), full_matrices=False)
        A = U[:, :rank] * S[:rank]
    return A @ A.T


@pytest.mark.parametrize(("ranks", "rank"), [((5, 5, 5, 5), 12), ((3, 9, 1, 12), 12), ((20, 4), 12), ((4, 4), 30)])
def test_in_turn_is_the_papers_merge_of_what_arrived(ranks, rank):
    """What came over the wire in float32 is not orthonormal to float64's rounding, and is not taken for it."""
    arrived = [rounded(sketch(seed, own)) for seed, own in enumerate(ranks)]
    merger = Merger(rank)
    for part in arrived:
        merger.add(part)
    V, sigma = merger.result().summary
    expected = paper(arrived, rank)
    found = (V * sigma.square()) @ V.T
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-13)
    np.testing.assert_allclose((V.T @ V).numpy(), np.eye(len(sigma)), atol=1e-11)


def test_merges_that_would_drop_nothing_wait_for_the_next(monkeypatch):
    sizes: list[list[int]] = []
    one_merge = merging.merge

    def counted(summaries, rank, exact):
        sizes.append([len(own.sigma) for own in summaries])
        return one_merge(summaries, rank, exact)

    monkeypatch.setattr(merging, "merge", counted)
    merger = Merger(12)
    for seed in range(6):
        merger.add(sketch(seed, 5))
    part = merger.result()
    assert sizes == [[5, 5, 5], [12, 5], [12, 5], [12, 5], [12]]
    assert part.truncations == 4
    assert part.merged


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("ranks", [(3, 4, 2), (3, 4, 5), (5, 5, 5), (9,), (14,)])
def test_a_merge_that_follows_at_once_spares_one_that_would_drop_nothing(monkeypatch, joint, ranks):
    """With or without it, the sketch of the earlier one and of what arrived since is the same to rounding."""
    rank = 12
    arrived = [rounded(sketch(seed, own)) for seed, own in enumerate(ranks, start=1)]
    earlier = Losses().merged([Part(sketch(0, 12)), Part(sketch(9, 6))], 12)
    whole, parts = Merger(rank, joint), Merger(rank, joint)
    for part in arrived:
        whole.add(part, truncations=2)
        parts.add(part, truncations=2)
    expected = whole.losses.merged([earlier, whole.result()], rank)
    calls: list[int] = []
    one_merge = merging.merge
    monkeypatch.setattr(merging, "merge", lambda held, *others: (calls.append(len(held)), one_merge(held, *others))[1])
    found = parts.losses.merged([earlier, *parts.parts()], rank)
    if sum(ranks) <= rank:
        assert len(calls) == 1
    (V, sigma), reference = found.summary, expected.summary
    np.testing.assert_allclose(sigma.numpy(), reference.sigma.numpy(), rtol=1e-10)
    np.testing.assert_allclose(
        ((V * sigma.square()) @ V.T).numpy(),
        ((reference.V * reference.sigma.square()) @ reference.V.T).numpy(),
        atol=1e-13,
    )
    assert (found.truncations, found.merged) == (expected.truncations, expected.merged)
    assert parts.losses.first == pytest.approx(whole.losses.first, rel=1e-9)
    # The trace of what arrived is that of its sigma, and the wire has rounded the lengths of its directions.
    assert parts.losses.share == pytest.approx(whole.losses.share, abs=1e-7)


def test_nothing_arrived_is_no_part():
    assert Merger(12).parts() == []


@pytest.mark.parametrize("exact", [(True, False), (False, True), (True, True), (True, True, False), (True, True, True)])
@pytest.mark.parametrize("rank", [6, 14, 50])
def test_known_blocks_change_rounding_only(exact, rank):
    parts = [sketch(seed, 8 + seed) for seed in range(len(exact))]
    (V, sigma), dropped = merge(parts, rank, exact)
    A = np.concatenate([factor(part) for part in parts], axis=1)
    U, S, _ = np.linalg.svd(A, full_matrices=False)
    kept = min(rank, A.shape[1])
    np.testing.assert_allclose(sigma.numpy(), S[:kept], rtol=1e-10)
    np.testing.assert_allclose(
        ((V * sigma.square()) @ V.T).numpy(), U[:, :kept] * S[:kept] ** 2 @ U[:, :kept].T, atol=1e-13
    )
    assert dropped == pytest.approx(S[rank] ** 2 if rank < len(S) else 0.0, abs=1e-14)


def test_known_blocks_are_not_computed(monkeypatch):
    computed: list[tuple[int, ...]] = []
    gram = spectral.upper_gram
    for module in (spectral, merging):
        monkeypatch.setattr(module, "upper_gram", lambda A: (computed.append(tuple(A.shape)), gram(A))[1])
    parts = [sketch(seed, 8) for seed in range(3)]
    for exact, expected in (
        ((True, True, True), []),
        ((True, False, False), [(60, 16)]),
        ((False, False, False), [(60, 24)]),
    ):
        computed.clear()
        merge(parts, 8, exact)
        assert computed == expected


def test_only_what_a_merge_made_is_known():
    one, other = Part(sketch(0, 5)), Part(sketch(1, 5))
    losses = Losses()
    assert not losses.merged([one], 8).merged
    empty = Part(Spectrum(one.summary.V[:, :0], one.summary.sigma[:0]))
    assert not losses.merged([empty, one], 8).merged
    assert losses.merged([one, other], 8).merged
    assert losses.merged([one], 3).merged
    assert losses.merged([losses.merged([one, other], 8)], 8).merged


def test_two_hundred_merges_stay_orthonormal():
    """Taking V'V for the identity adds up what each merge rounds, and no more."""
    state = sketch(0, 20)
    for seed in range(1, 201):
        state, _ = merge([state, rounded(sketch(seed, 4, smallest=1e-3))], 20, (seed > 1, False))
    products = state.V.T @ state.V
    chain = float((products - torch.eye(20)).abs().max())
    assert chain < 1e-11


def test_float32_statistics_are_computed_whole():
    parts = [Spectrum(one.V.float(), one.sigma.float()) for one in (sketch(0, 8), sketch(1, 8))]
    known, whole = merge(parts, 8, (True, True))[0], merge(parts, 8)[0]
    assert torch.equal(known.V, whole.V)
    assert torch.equal(known.sigma, whole.sigma)


def test_a_summary_of_a_merge_is_as_good_as_one_of_all_samples():
    H = [torch.from_numpy(np.random.default_rng(seed).standard_normal((7, 60))) for seed in range(4)]
    merger = Merger(28)
    for own in H:
        merger.add(summarise(own, 28)[0])
    V, sigma = merger.result().summary
    everything = torch.cat(H)
    np.testing.assert_allclose(((V * sigma.square()) @ V.T).numpy(), (everything.T @ everything).numpy(), atol=1e-11)
