"""Robust sums: geometric medians of groups' means and bounded shares, against plain NumPy; what an attacker can do."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.engine.in_process import InProcess
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import ignores_partition
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.air import AIR
from fcl_bench.methods.closed_form.ds_al import DSAL
from fcl_bench.methods.closed_form.fedklda import FedKLDA
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.ranpac import RanPAC
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.options.robust import RobustSums, median_factors, most_samples, require_sums
from tests.methods.harness import context_of
from tests.methods.training_harness import feature_tasks, federation_of
from tests.small_runs import run_in, settings_for

METHODS = {
    "fedncm": FedNCM(),
    "stsa": STSA(M=20),
    "afl": AFL(upload="sums"),
    "air": AIR(M=10),
    "ds_al": DSAL(M=10),
    "fedklda": FedKLDA(M=10),
    "ranpac": RanPAC(M=10),
}


def drawn(rng: np.random.Generator, groups: int) -> tuple[list[dict[str, np.ndarray]], np.ndarray]:
    """Sums of groups: a Gram matrix and class sums of N_g samples around 1."""
    samples = rng.integers(3, 30, groups).astype(float)
    parts = [1 + rng.standard_normal((int(n), 4)) for n in samples]
    labels = [np.eye(3)[rng.integers(0, 3, len(H))] for H in parts]
    return [{"G": H.T @ H, "C": H.T @ Y} for H, Y in zip(parts, labels, strict=True)], samples


def factors_of(sums: list[dict[str, np.ndarray]], samples: np.ndarray) -> np.ndarray:
    fields = [torch.from_numpy(np.stack([own[name].ravel() for own in sums])) for name in sums[0]]
    return median_factors(fields, torch.from_numpy(samples)).numpy()


def scaled_means(sums: list[dict[str, np.ndarray]], samples: np.ndarray) -> np.ndarray:
    """(B, fields) S_g / N_g, each field over its (lower) median length."""
    fields = []
    for name in sums[0]:
        means = np.stack([own[name].ravel() / n for own, n in zip(sums, samples, strict=True)])
        fields.append(means / np.sort(np.linalg.norm(means, axis=1))[(len(sums) - 1) // 2])
    return np.hstack(fields)


@pytest.mark.parametrize("groups", [5, 8])
def test_the_total_is_n_times_the_geometric_median_of_the_means(groups):
    sums, samples = drawn(np.random.default_rng(groups), groups)
    means = scaled_means(sums, samples)
    m = means.mean(0)
    for _ in range(500):  # Weiszfeld's algorithm on the means themselves
        weights = samples / np.linalg.norm(means - m, axis=1)
        m = weights @ means / weights.sum()
    pull = (samples / np.linalg.norm(means - m, axis=1)) @ (means - m)
    assert np.abs(pull).max() < 1e-9 * samples.sum()  # the gradient of the sum of distances
    found = factors_of(sums, samples) * samples / samples.sum()
    assert found.sum() == pytest.approx(1)
    np.testing.assert_allclose(found @ means, m, atol=1e-9)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 9), st.sampled_from([1.0, 1e3, 1e9]))
def test_gram_matrices_stay_positive_semidefinite_and_half_of_the_samples_bound_the_rest(seed, groups, times):
    rng = np.random.default_rng(seed)
    sums, samples = drawn(rng, groups)
    bad = samples.argmin()
    sums[bad] = {name: times * value * rng.choice([-1, 1]) ** (name == "C") for name, value in sums[bad].items()}
    factors = factors_of(sums, samples)
    assert (factors >= 0).all()
    total = sum(factor * own["G"] for factor, own in zip(factors, sums, strict=True))
    assert np.linalg.eigvalsh(total)[0] >= -1e-12 * np.trace(total)
    share = samples[bad] / samples.sum()
    if share < 0.45:  # Minsker (2015), Lemma 2.1: m is no further from any centre than so many times the others' radius
        means = scaled_means(sums, samples)
        others = np.delete(means, bad, axis=0)
        centre = others.mean(0)
        radius = np.linalg.norm(others - centre, axis=1).max()
        m = factors * samples / samples.sum() @ means
        assert np.linalg.norm(m - centre) <= 2 * (1 - share) / (1 - 2 * share) * radius * (1 + 1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.floats(0.01, 1))
def test_no_client_counts_more_than_its_share(samples, share):
    held = np.array(samples, dtype=float)
    most = most_samples(held.tolist(), share)
    counted = np.minimum(held, most)
    if share * len(held) < 1:
        assert (counted == held.min()).all()
        return
    assert counted.max() <= share * counted.sum() * (1 + 1e-9)
    if most < held.max() * (1 - 1e-9):  # a larger bound would break it, unless shares of any bound are equal
        more = np.minimum(held, most * 1.001)
        assert more.max() >= share * more.sum() * (1 - 1e-9)


class Reordered(InProcess):
    """Clients with odd numbers name their fields in the opposite order."""

    def exchange(self, present, broadcast):
        for reply in super().exchange(present, broadcast):
            fields = dict([*reply.upload.items()][::-1]) if reply.client % 2 else reply.upload.tensors
            yield dataclasses.replace(reply, upload=reply.upload.with_tensors(fields))


def learnt(method, tasks, groups=0, share=1.0, transport=InProcess.of):
    context = context_of(6)
    robust = [lambda accounting, validation: RobustSums(method, context, validation, groups, share)]
    steps = robust if groups or share < 1 else []
    found = federation_of(method, context, tasks, steps=steps, transport=transport)
    found.run(lambda _: None)
    return found


@pytest.mark.slow_cases("air", "ds_al", "fedklda", "ranpac")
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_of_clients_that_hold_the_same_the_robust_sum_is_the_sum(method):
    tasks = [[clients[0]] * 6 for clients in feature_tasks(0, [2, 2], [[12], [9]])]
    plain, robust = learnt(method, tasks), learnt(method, tasks, groups=4, share=1 / 6)
    for name, value in plain.server.model().items():
        torch.testing.assert_close(robust.server.model()[name], value, rtol=1e-7, atol=1e-9)
    assert [row.up_bytes for row in robust.state.ledger.uploads] == [row.up_bytes for row in plain.state.ledger.uploads]


def test_one_group_in_which_nobody_is_bounded_is_the_sum_itself():
    tasks = feature_tasks(0, [2, 2], [[12, 5, 7], [9, 0, 6]])
    plain, robust = learnt(STSA(M=10), tasks), learnt(STSA(M=10), tasks, groups=1)
    torch.testing.assert_close(robust.server.model()["W"], plain.server.model()["W"], rtol=1e-9, atol=1e-12)


def test_the_order_of_an_uploads_fields_changes_nothing():
    tasks = feature_tasks(0, [2, 2], [[12, 5, 7, 8], [9, 0, 6, 9]])
    usual = learnt(METHODS["afl"], tasks, groups=3)
    other = learnt(METHODS["afl"], tasks, groups=3, transport=Reordered.of)
    assert torch.equal(usual.server.model()["W"], other.server.model()["W"])


@pytest.mark.slow_cases("fedncm", "stsa")
@pytest.mark.parametrize("name", ["fedncm", "stsa", "afl"])
def test_an_attacker_that_ruins_the_sum_does_not_ruin_the_robust_one(name):
    honest = feature_tasks(1, [2, 2], [[15] * 7, [15] * 7], inputs=6)
    attacked = [
        [(100 * clients[0][0], labels_of(clients[0][1], first)), *clients[1:]]
        for first, clients in zip((0, 2), honest, strict=True)
    ]
    inputs = torch.cat([Z for clients in honest for Z, _ in clients[1:]])
    labels = torch.cat([y for clients in honest for _, y in clients[1:]])

    def accuracy(tasks, groups):
        server = learnt(METHODS[name], tasks, groups).server
        return float((server.predict(inputs).argmax(1) == labels).double().mean())

    assert accuracy(attacked, 0) < 0.5 < 0.7 < accuracy(honest, 0)
    assert accuracy(attacked, 7) > accuracy(honest, 7) - 0.05 > 0.65


def labels_of(labels: torch.Tensor, first: int) -> torch.Tensor:
    """The task's other class."""
    return first + 1 - (labels - first)


@pytest.mark.slow_cases("robust_groups=6-", "method=fedran-", "transport=tree-", "faults.late=0.2-", "client_share=0-")
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["robust_groups=2"],
            "robust_groups=2 client_share=1 with clients=5 (robust_groups=0 or 3 to clients",
        ),
        (
            ["robust_groups=6"],
            "robust_groups=6 client_share=1 with clients=5 (robust_groups=0 or 3 to clients",
        ),
        (["client_share=0.1"], "robust_groups=0 client_share=0.1 with clients=5 ("),
        (["robust_groups=3", "method=fedran"], "with method=fedran: not all of its uploads add up"),
        (["client_share=0.5", "method=afl"], "client_share=0.5 with method=afl: not all of its uploads add up"),
        (["robust_groups=3", "secure=sums"], "with secure=sums: the server sees no client's upload by itself"),
        (["robust_groups=3", "transport=tree"], "with transport=tree: the server sees no client's"),
        (["robust_groups=3", "faults=random", "faults.late=0.2"], "with faults.late: a late upload is in no group"),
        (["client_share=0"], "client_share=0"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_line(tmp_path, overrides, line):
    with pytest.raises(UserError, match=re.escape(line)):
        run_in(tmp_path, "method=stsa", *overrides)
    assert not list(tmp_path.glob("runs/*"))


def test_the_result_depends_on_the_partition_and_the_plain_sums_id_is_what_it_was(tmp_path):
    plain = settings_for(tmp_path, "method=stsa")
    robust = settings_for(tmp_path, "method=stsa", "robust_groups=3", "client_share=0.5")
    assert [ignores_partition(own.resolved) for own in (plain, robust)] == [True, False]
    added = {key: value for key, value in robust.identity().items() if key not in plain.identity()}
    assert added == {"robust_groups": 3, "client_share": 0.5}


def test_a_robust_sum_cannot_forget_a_client(tmp_path):
    class Withdrawing(type(settings_for(tmp_path).transport)):
        withdrawal = True

    chosen = dataclasses.replace(settings_for(tmp_path, "method=stsa", "robust_groups=3"), transport=Withdrawing())
    with pytest.raises(UserError, match="of a robust sum no client can be taken out"):
        require_sums(chosen, context_of(6))
