"""An attacker looks for the clients' samples in their uploads, and finds those that the engine counts."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.linalg.structure import symmetric
from fcl_bench.methods.closed_form.fedfecam import FedFeCAM
from fcl_bench.methods.closed_form.ranpac import RanPAC
from fcl_bench.protocol.message import Message
from tests.methods.test_revealed import run, small, tasks_of


def directions(upload: Message, gamma: float) -> list[torch.Tensor]:
    """Columns, and what a matrix of rank one is made of: all that the server has with a direction in it."""
    found = []
    matrices = {name: value for name, value in upload.items() if value.is_floating_point() and value.ndim == 2}
    grams = {name: G - gamma * torch.eye(len(G)).to(G) for name, G in matrices.items() if G.shape[0] == G.shape[1]}
    whole = dict(matrices)
    if gamma and grams:  # a solution times its system
        [G] = [matrices[name] for name in grams]
        whole = {name: G @ value for name, value in matrices.items() if name not in grams}
    for name, value in whole.items():
        if name == "Q":  # packed second moments, one matrix per column
            grams |= {f"Q{i}": symmetric(column) for i, column in enumerate(value.T)}
        elif name not in grams and name != "n":
            found += list(value.T)
    for G in grams.values():
        values, vectors = torch.linalg.eigh(G)
        if values[-1] > 0 and values[:-1].abs().max() < 1e-9 * values[-1]:
            found.append(vectors[:, -1])
    return [v / v.norm() for v in found if v.norm() > 0]


ATTACKED = {
    **{name: small(name) for name in ("stsa", "air", "ranpac", "afl", "afcl", "fedran", "centred_sketch", "fedncm")},
    **{name: small(name) for name in ("fedlda", "fedfecam", "stsa_e")},
    "held out": RanPAC(M=8, ridge="held_out"),
    "power 1": FedFeCAM(M=8, tukey=1),
}


@pytest.mark.parametrize("name", ATTACKED)
def test_an_attacker_finds_the_samples_that_are_counted_and_no_others(name):
    """A sample is found where its features (or their roots, of FedFeCAM) point as something in an upload does."""
    method = ATTACKED[name]
    told, recorder, federation = run(method, tasks := tasks_of(seed=1))
    H = federation.server.random_features
    found = set()
    for client, upload, _ in recorder.uploads:
        told_directions = directions(upload, getattr(method, "gamma", 0.0) if name in ("afl", "afcl") else 0.0)
        for number, h in enumerate(H.map(tasks[upload.task][client][0])):
            seen = [abs(float(v @ (h / h.norm()))) > 1 - 1e-10 for v in told_directions if len(v) == len(h)]
            if any(seen):
                found.add((upload.task, client, number))
    assert len(found) == told["revealed_samples"] > 0
