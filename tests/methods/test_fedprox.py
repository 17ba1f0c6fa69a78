"""FedProx against FedAvg, scalar quadratics with known fixed points, and plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.fedprox import FedProx
from fcl_bench.training.knobs import Training
from fcl_bench.typed import typed_instance
from tests.methods.drift_harness import (
    EXACT,
    play_scalar,
    quadratic,
    rounds_of,
    theta_of,
    train_locally,
    weight_of,
    with_loss,
)
from tests.methods.plain_training import differing, made_tasks, state_of
from tests.methods.training_harness import feature_tasks, federation_of, learn_images, tiny_context
from tests.methods.whole_runs import feature_context

SIZES = [[12, 7, 0], [9, 0, 8]]
FULL = Training(rounds=2, epochs=2, batch_size=5, lr=0.05, momentum=0.9, fraction=0.7, schedule="cosine")


@pytest.mark.slow_cases("images")
@pytest.mark.parametrize("trains", ["images", "features"])
def test_without_the_term_it_is_fedavg_bit_for_bit(trains):
    if trains == "images":
        context, tasks = tiny_context(), made_tasks(SIZES)
    else:
        context, tasks = feature_context(), feature_tasks(0, [3, 2], SIZES)
    plain, none, some = (
        federation_of(method, context, tasks)
        for method in (
            FedAvg(FULL, trains=trains),
            FedProx(FULL, trains=trains, mu=0.0),
            FedProx(FULL, trains=trains, mu=0.5),
        )
    )
    for federation in (plain, none, some):
        federation.run(lambda _: None)
    assert not differing(state_of(plain.server), state_of(none.server))
    assert differing(state_of(plain.server), state_of(some.server))
    # Nothing more is sent or kept, whatever the weight.
    rows = [[(r.up_bytes, r.down_bytes) for r in f.state.ledger.uploads] for f in (plain, none, some)]
    assert rows[0] == rows[1] == rows[2]
    assert some.state.client_storage_bytes == {}


@pytest.mark.parametrize(("epochs", "same"), [(1, True), (2, False)])
def test_the_first_step_of_a_round_is_fedavgs(epochs, same):
    """The term is zero there; a second step feels it."""
    knobs = Training(rounds=1, epochs=epochs, batch_size=64, lr=0.1)
    prox, plain = (
        learn_images(method, tiny_context(), made_tasks([[20, 9]]))
        for method in (FedProx(knobs, mu=5.0), FedAvg(knobs))
    )
    assert (not differing(state_of(prox), state_of(plain))) == same


@pytest.mark.slow_cases("0.5-2.25")
@pytest.mark.parametrize(("mu", "fixed_point"), [(0.0, 2.0), (0.5, 2.25)])
def test_scalar_quadratics_with_exact_local_solves(mu, fixed_point):
    """f = 1/2 w^2 and 3/2 (w - 4)^2, equal weights; the optimum of both together is 3."""
    server, _ = play_scalar(with_loss(FedProx, quadratic)(Training(rounds=15, **EXACT), trains="features", mu=mu))
    assert weight_of(server) == pytest.approx(fixed_point, abs=1e-5)


@pytest.mark.slow
def test_clients_drift_less_the_heavier_the_term():
    def drift(mu):
        moved = []

        def seen(client, broadcast, upload):
            names = [name for name in upload if ".running_" not in name]
            moved.append(sum(float((upload[name] - broadcast[name]).square().sum()) for name in names) ** 0.5)

        knobs = Training(rounds=1, epochs=10, batch_size=8, lr=0.05, augment="none")
        learn_images(FedProx(knobs, mu=mu), tiny_context(), made_tasks([[16, 11]]), seen=seen)
        return moved

    found = np.array([drift(mu) for mu in (0.0, 0.1, 1.0, 10.0)])
    assert (np.diff(found, axis=0) < 0).all()


def test_two_rounds_are_those_of_plain_numpy():
    """Mini-batches, momentum, decay; clients count by their samples."""
    knobs = Training(rounds=2, epochs=3, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.02, augment="none")
    tasks, mu, broadcasts = feature_tasks(1, [3], [[9, 14]]), 0.7, []
    method = FedProx(knobs, trains="features", mu=mu)
    w = np.zeros(0)
    for _, round_, server, *_ in rounds_of(method, feature_context(), tasks, lambda *args: broadcasts.append(args[1])):
        start = theta_of(broadcasts[0], 1) if round_ == 0 else w
        trained = [
            train_locally(start, X.numpy(), y.numpy(), knobs, (0, round_, k), lambda g, v, at=start: g + mu * (v - at))[
                0
            ]
            for k, (X, y) in enumerate(tasks[0])
        ]
        w = (9 * trained[0] + 14 * trained[1]) / 23
        np.testing.assert_allclose(theta_of(server.network.state(), 1), w, atol=2e-6)


def test_frozen_parameters_have_no_term():
    method = FedProx(FULL, frozen_heads=True, frozen_stages=1, mu=1.0)
    ends = []
    learn_images(method, tiny_context(), made_tasks(SIZES), after=lambda _, server: ends.append(state_of(server)))
    still = {name for name in ends[0] if name.startswith(("heads.0", "body.stage1"))}
    assert still
    assert not differing({name: ends[0][name] for name in still}, ends[1])


def test_a_negative_weight_is_refused():
    with pytest.raises(UserError, match=r"^method\.mu=-1\.0 "):
        typed_instance(FedProx, {"mu": -1.0}, "method")


def test_a_large_weight_that_diverges_is_told():
    knobs = Training(rounds=3, epochs=40, batch_size=8, lr=1.0, augment="none")
    with pytest.raises(UserError, match=r"training diverged"):
        learn_images(FedProx(knobs, mu=100.0), tiny_context(), made_tasks([[16, 11]]))
