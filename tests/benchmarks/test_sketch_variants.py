"""The script that tries variants of the centred sketch: its identities, on data of a few hundred samples."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import sketch_variants
import torch
from sketches.experiment import experiment
from sketches.gaussian import modelled
from sketches.local import Local
from sketches.rounding import rounded
from sketches.server import Server
from sketches.stream import Stream
from sketches.uploads import ranks_of
from sketches.variants import ALL, Variant, variants

from fcl_bench.data.sources.array_files import FeatureFile
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.stsa import STSA
from tests.conftest import write_features
from tests.methods.harness import context_of, learn

M, SEED = 40, 3
PLAIN = Variant("plain", rank=5, input_rank=4, bits=32, sums_bits=32, ridge=1.0)


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Stream:
    file = write_features(tmp_path_factory.mktemp("variants") / "features.npz")
    return Stream.of(FeatureFile(path=str(file)).load(), tasks=2, clients=3, beta=0.5, seed=SEED)


def servers_of(stream: Stream, *chosen: Variant) -> dict[str, Server]:
    named = [replace(v, name=str(number)) for number, v in enumerate(chosen)]
    # An unused first variant: it says how many directions are found at most.
    widest = replace(PLAIN, name="widest", rank=M, input_rank=12)
    servers = experiment(stream, [widest, *named], M, SEED, remainder=torch.float64)[1]
    return {name: server for name, server in servers.items() if name != "widest"}


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


def own_method(stream: Stream, method: CentredSketch | STSA) -> torch.Tensor:
    """The classifier of the project's own method on the same shards."""
    tasks = [[(stream.Z[part].numpy(), stream.labels[part].numpy()) for part in parts] for _, parts, _ in stream.tasks]
    return learn(method, context_of(stream.Z.shape[1], SEED), tasks)[1][-1]


@pytest.mark.parametrize("rank", [0, 5])
def test_with_everything_off_it_is_the_projects_centred_sketch(stream, rank):
    [server] = servers_of(stream, replace(PLAIN, remainder="isotropic", rank=rank)).values()
    close(server.W, own_method(stream, CentredSketch(M=M, rank=rank, ridge=1.0)))


def test_the_base_is_the_projects_gaussian_remainder(stream):
    [server] = servers_of(stream, PLAIN).values()
    project = CentredSketch(M=M, rank=5, ridge=1.0, remainder="gaussian", input_rank=4)
    torch.testing.assert_close(server.W, own_method(stream, project), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        {"remainder": "exact"},
        {"rank": M},
        {"rank": M, "centre": "global"},
        {"rank": M, "clusters": 2},
        {"rank": M, "own_counts": True, "own_sigma": 0.5},
        {"rank": M, "difference": True},
        {"linear": M},
    ],
)
def test_where_nothing_is_dropped_it_is_stsa(stream, changes):
    [server] = servers_of(stream, replace(PLAIN, **changes)).values()
    close(server.W, own_method(stream, STSA(M=M, gamma=1.0)), 1e-6)


def test_a_remainder_that_is_all_isotropic_is_the_isotropic_one(stream):
    ours, theirs = servers_of(stream, replace(PLAIN, mix=1.0), replace(PLAIN, remainder="isotropic")).values()
    close(ours.G, theirs.G)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mix": 0.0},
        {"order": 6},
        {"remainder": "isotropic"},
        {"ranks": "total"},
        {"ranks": "capped"},
        {"ranks": "relative"},
        {"centre": "global"},
        {"subspace": 6},
        {"clusters": 2},
        {"own_counts": True},
        {"own_means": True},
        {"linear": 6},
        {"linear": 6, "linear_inputs": ALL, "input_rank": ALL},
        {"own_basis": 6},
        {"diagonal": "input"},
    ],
)
def test_no_energy_is_lost_and_none_is_made(stream, changes):
    exact, server = servers_of(stream, replace(PLAIN, remainder="exact"), replace(PLAIN, **changes)).values()
    assert float(server.G.trace()) == pytest.approx(float(exact.G.trace()), rel=1e-10)
    assert float(torch.linalg.eigvalsh(server.G)[0]) > -1e-9 * float(server.G.trace())


@pytest.mark.parametrize("remainder", ["gaussian", "isotropic"])
def test_the_diagonal_that_is_sent_is_the_estimates(stream, remainder):
    sent = replace(PLAIN, diagonal="hidden", remainder=remainder)
    exact, server = servers_of(stream, replace(PLAIN, remainder="exact"), sent).values()
    close(server.G.diagonal(), exact.G.diagonal())


def test_a_prediction_of_the_class_sums_leaves_less_to_be_rounded(stream):
    coarse = replace(PLAIN, sums_bits=4)
    exact, plain, predicted = servers_of(stream, PLAIN, coarse, replace(coarse, predicted=True)).values()
    errors = [float((server.B - exact.B).norm() / exact.B.norm()) for server in (predicted, plain)]
    assert 0 < errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("ridge", ["auto", "first", "gcv"])
def test_ridges_from_the_statistics(stream, ridge):
    chosen = replace(PLAIN, remainder="exact", ridge=ridge)
    whole = servers_of(stream, chosen)["0"]
    first = servers_of(replace(stream, tasks=stream.tasks[:1]), chosen)["0"]
    if ridge == "first":
        assert whole.ridge == first.ridge
    else:
        assert whole.ridge != first.ridge
    project = own_method(stream, STSA(M=M, gamma="auto" if ridge == "first" else ridge))
    assert (float((whole.W - project).abs().max()) > 1e-6) == (ridge == "first")


def test_ranks_by_energy_share_out_the_same_total():
    rng = np.random.default_rng(0)
    sizes = [60, 20, 4]
    clients = [
        Local.of(
            torch.from_numpy(rng.standard_normal((n, 6))),
            torch.from_numpy(rng.standard_normal((n, 30)) / (1 + 2 * number)),
            torch.from_numpy(rng.integers(0, 2, n)),
            2,
            most=30,
            most_inputs=3,
        )
        for number, n in enumerate(sizes)
    ]
    equal = ranks_of(replace(PLAIN, rank=10), clients)
    total = ranks_of(replace(PLAIN, rank=10, ranks="total"), clients)
    capped = ranks_of(replace(PLAIN, rank=10, ranks="capped"), clients)
    spectra = [one.hidden.top.sigma for one in clients]
    assert equal == [10, 10, len(spectra[2])]
    assert sum(total) == sum(equal)
    assert total != equal
    kept = min(float(sigma[rank - 1]) for sigma, rank in zip(spectra, total, strict=True) if rank)
    dropped = max(float(sigma[rank]) for sigma, rank in zip(spectra, total, strict=True) if rank < len(sigma))
    assert kept >= dropped
    assert max(capped) <= 10
    assert sum(capped) == 3 * sum(equal) // 4
    for ranks in ("total", "relative"):
        assert ranks_of(replace(PLAIN, rank=10, ranks=ranks), clients[:1]) == [10]


def test_the_model_is_the_scatter_of_rectified_gaussians():
    rng = np.random.default_rng(1)
    root, P, means = rng.standard_normal((4, 4)), rng.standard_normal((4, 6)), rng.standard_normal((4, 3))
    sizes, group, draws = np.array([2.0, 3.0, 1.0]), np.array([0, 0, 1]), 400_000
    of_group: dict[int, list] = {0: [], 1: []}
    for mean, size, number in zip(means.T, sizes, group, strict=True):
        H = np.maximum((mean + rng.standard_normal((draws, 4)) @ root.T) @ P, 0)
        of_group[number].append((size, H.mean(0), np.cov(H.T)))
    expected = np.zeros((6, 6))
    for parts in of_group.values():
        centre = sum(size * mean for size, mean, _ in parts) / sum(size for size, _, _ in parts)
        expected += sum(size * (cov + np.outer(mean - centre, mean - centre)) for size, mean, cov in parts)
    tensors = [torch.from_numpy(array) for array in (P, root @ root.T, means, sizes, group)]
    errors = []
    for order in (1, 2, 12):
        Q = modelled(*tensors, order).numpy()
        errors.append(np.abs(Q - expected).max() / np.abs(expected).max())
    assert errors[2] < 0.01 < errors[1] < errors[0]


def test_clusters_keep_sums_and_lower_the_scatter(stream):
    _, holdings, _ = stream.tasks[0]
    Z = stream.Z[holdings[0]]
    which = torch.unique(stream.labels[holdings[0]], return_inverse=True)[1]
    classes = int(which.max()) + 1
    one = Local.of(Z, Z.relu(), which, classes, most=12, most_inputs=12)
    two = one.clustered()
    assert two.sizes.sum() == len(Z)
    close((two.means * two.sizes).view(12, classes, 2).sum(2), one.S_z)
    assert two.inputs.energy < 0.95 * one.inputs.energy


def test_bytes_are_those_of_the_formula(stream):
    r, k, d = 5, 4, 12
    [server] = servers_of(stream, replace(PLAIN, bits=8, sums_bits=16)).values()
    c = max(len(columns) for columns, _, _ in stream.tasks)
    # Factors with a scale and a singular value per column; sums with a scale per column; counts; two energies.
    assert server.up == M * r + 8 * r + 2 * M * c + 4 * c + 4 * c + 4 + d * k + 8 * k + 2 * d * c + 4 * c + 4


def test_rounding_keeps_columns_of_length_one_and_is_finer_with_more_bits():
    V = torch.linalg.qr(torch.from_numpy(np.random.default_rng(2).standard_normal((200, 6))))[0]
    errors = [float((rounded(V, bits) - V).norm()) for bits in (3, 4, 8, 32)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0
    mixed = rounded(V, 4, fine=2)
    assert torch.equal(mixed[:, :2], rounded(V, 8)[:, :2])
    assert torch.equal(mixed[:, 2:], rounded(V, 4)[:, 2:])
    close(torch.linalg.vector_norm(mixed, dim=0), torch.ones(6, dtype=V.dtype))


@pytest.mark.slow
def test_the_script_tries_every_variant(tmp_path, capsys):
    file, out = write_features(tmp_path / "features.npz"), tmp_path / "found.json"
    options = ["--tasks", "2", "--clients", "3", "--beta", "0.5", "--M", "30", "--rank", "4", "--input-rank", "4"]
    sketch_variants.main(["--features", str(file), *options, "--seeds", "0", "1", "--coding", "--out", str(out)])
    table = capsys.readouterr().out
    found = json.loads(out.read_text())
    names = [v.name for v in variants()]
    assert all(f"| {name} | " in table for name in names)
    for seed in found["results"]:
        assert list(seed) == names
        assert all(np.isfinite(result["A"]).all() and len(result["A"]) == 2 for result in seed.values())
        assert seed["base r/2"]["up"] < seed["base"]["up"] < seed["not rounded"]["up"] < seed["full Gram"]["up"]
        assert np.mean(seed["full Gram"]["A"]) > 60
    assert all(0.3 < share < 2 for name, share in found["coding"] if not name.startswith("entropy"))
    with pytest.raises(SystemExit):
        sketch_variants.main(["--features", str(file), "--only", "no such"])
