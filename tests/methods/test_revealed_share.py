"""How many of a data set's samples STSA-E's groups send alone: the figures of docs/explanation/privacy.md."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.data.partitions.dirichlet import Dirichlet
from fcl_bench.methods.closed_form.stsa_e import STSAE
from tests.conftest import REPOSITORY
from tests.methods.harness import context_of
from tests.methods.training_harness import federation_of

GROUPS, CLIENTS = 50, 5


def expected_share(samples: int, beta: float, points: int = 400_000) -> float:
    """Percent of a class's samples that are the only ones of their class in their group.

    Each of the class's N - 1 other samples is with the same client, whose share is p by Dirichlet's law, and in the
    same of its groups, with probability p / K_D: that is K E[p (1 - p/K_D)^(N - 1)], p ~ Beta(beta, (K - 1) beta).
    """
    p = np.random.default_rng(0).beta(beta, (CLIENTS - 1) * beta, points)
    return float(100 * CLIENTS * (p * (1 - p / GROUPS) ** (samples - 1)).mean())


#: Samples per class of CIFAR-100 and, on average, of ImageNet-R.
PRINTED = {500: {0.1: "3.4", 0.5: "8.9", 1: "11.1"}, 120: {0.1: "22.5", 0.5: "41.5", 1: "49.1"}}


@pytest.mark.parametrize("samples", PRINTED)
def test_the_page_has_the_expected_shares_of_lone_samples(samples):
    shares = [f"{expected_share(samples, beta):.1f}" for beta in PRINTED[samples]]
    for found, printed in zip(shares, PRINTED[samples].values(), strict=True):
        assert abs(float(found) - float(printed)) <= 0.15
    row = " | ".join(f"{share} %" for share in PRINTED[samples].values())
    assert f"| {row} |" in (REPOSITORY / "docs" / "explanation" / "privacy.md").read_text()


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_a_run_tells_as_many_as_expected(beta):
    """Twenty classes of 100 samples: the mean over a few partitions."""
    labels, shares = np.repeat(np.arange(20), 100), []
    Z = np.random.default_rng(0).standard_normal((len(labels), 2))
    for seed in range(6):
        parts = Dirichlet(beta).holdings(labels, CLIENTS, np.random.default_rng(seed))
        tasks = [[(torch.from_numpy(Z[part]), torch.from_numpy(labels[part])) for part in parts]]
        federation = federation_of(STSAE(M=None, dummy_clients=GROUPS), context_of(2), tasks)
        federation.run(lambda _: None)
        shares.append(100 * federation.state.ledger.single_samples()["revealed_samples"] / len(labels))
    assert np.mean(shares) == pytest.approx(expected_share(100, beta), abs=3)
