"""SCAFFOLD: FedAvg's first round, the optimum of quadratics, variates that add up, and plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.scaffold import Scaffold
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.training.knobs import Training
from fcl_bench.typed import typed_instance
from tests.methods.drift_harness import (
    COUNTS,
    SMALL,
    padded,
    play_scalar,
    quadratic,
    rounds_of,
    theta_of,
    train_locally,
    weight_of,
    with_loss,
)
from tests.methods.plain_training import differing, made_tasks, state_of
from tests.methods.training_harness import feature_tasks, federation_of, tiny_context
from tests.methods.whole_runs import feature_context


@pytest.mark.parametrize("trains", ["images", "features"])
def test_the_first_round_is_fedavgs_bit_for_bit_and_the_second_is_not(trains):
    """All variates are zero in it."""
    context = tiny_context() if trains == "images" else feature_context()
    tasks = made_tasks(COUNTS[:1]) if trains == "images" else feature_tasks(0, [3], COUNTS[:1])
    knobs = Training(**{**SMALL, "rounds": 2, "momentum": 0.5, "augment": "crop_flip"})
    plain, ours = (
        [state_of(server) for _, _, server, *_ in rounds_of(method, context, tasks)]
        for method in (FedAvg(knobs, trains=trains), Scaffold(knobs, trains=trains))
    )
    assert not differing(plain[0], ours[0])
    assert differing(plain[1], ours[1])


@pytest.mark.parametrize(("eta_g", "momentum"), [(1.0, 0.0), (0.5, 0.0), (1.0, 0.5)])
def test_scalar_quadratics_come_to_the_optimum(eta_g, momentum):
    """f = 1/2 w^2 and 3/2 (w - 4)^2 have their common minimum at 3, where their gradients are 3 and -3."""
    knobs = {"rounds": 40, "epochs": 5, "lr": 0.1, "momentum": momentum, "weight_decay": 0.0, "weighting": "uniform"}
    server, states = play_scalar(with_loss(Scaffold, quadratic)(Training(**knobs), trains="features", eta_g=eta_g))
    assert weight_of(server) == pytest.approx(3.0, abs=1e-4)
    variates = [float(states[k]["variate.0.heads.0.weight"]) for k in (0, 1)]
    np.testing.assert_allclose(variates, [3.0, -3.0], atol=1e-3)


@pytest.mark.parametrize("knobs", [{}, {"momentum": 0.9}, {"rates": {"heads": 0.03}}, {"schedule": "cosine"}])
def test_a_constant_gradient_is_read_off_the_steps_whatever_the_optimiser_makes_of_it(knobs):
    """Loss s_k w: after one round c_k = s_k, also with momentum, a rate of its own, a schedule; then all step alike."""
    slopes = (2.0, -5.0)
    training = Training(rounds=3, epochs=4, lr=0.01, weight_decay=0.0, weighting="uniform", **knobs)
    method = with_loss(Scaffold, lambda client, w: slopes[client] * w)(training, trains="features")
    server, states = play_scalar(method)
    assert [float(states[k]["variate.0.heads.0.weight"]) for k in (0, 1)] == pytest.approx(slopes, rel=1e-4)
    assert float(server.mean("heads.0.weight")) == pytest.approx(-1.5, rel=1e-4)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_servers_variate_is_the_mean_of_the_clients_after_every_round(fraction, reset):
    """Whoever took part, also where clients come later and heads grow."""
    method = Scaffold(Training(fraction=fraction, **SMALL), trains="features", reset=reset)
    met: set[int] = set()
    before: dict = {}
    for task, round_, server, states, present in rounds_of(
        method, feature_context(), feature_tasks(0, [3, 2, 2], COUNTS)
    ):
        available = {k for k, n in enumerate(COUNTS[task.index]) if n}
        met = available if reset and round_ == 0 else met | available
        assert server.met == met
        prefix = f"variate.{task.index if reset else 0}."
        for name in server.sums:
            of = [state[prefix + name].double() for state in states.values() if prefix + name in state]
            torch.testing.assert_close(server.mean(name), sum(of) / len(met), rtol=0, atol=1e-6)
        assert set(server.sums) >= set(server.parameters())
        for k, state in before.items():
            assert (state.keys() == states[k].keys() and not differing(state, states[k])) == (k not in present)
        before = {k: {name: value.clone() for name, value in state.items()} for k, state in states.items()}


@pytest.mark.parametrize(("weighting", "momentum", "eta_g"), [("uniform", 0.0, 1.0), ("samples", 0.4, 0.7)])
def test_rounds_over_two_tasks_are_those_of_plain_numpy(weighting, momentum, eta_g):
    """Growing heads, absent clients, mini-batches of different numbers, decay; c_k is a mean of gradients."""
    knobs = {**SMALL, "rounds": 3, "weight_decay": 0.02, "fraction": 0.7, "lr": 0.1, "momentum": momentum}
    knobs = Training(**{**knobs, "weighting": weighting})
    method, context, tasks = (
        Scaffold(knobs, loss_classes="seen", trains="features", eta_g=eta_g),
        feature_context(),
        feature_tasks(1, [3, 2], COUNTS[:2]),
    )
    x, c, variates, met, broadcasts = None, None, {}, set(), []
    for task, round_, server, states, present in rounds_of(
        method, context, tasks, seen=lambda *args: broadcasts.append(args[1])
    ):
        met |= {k for k, n in enumerate(COUNTS[task.index]) if n}
        if round_ == 0:  # old rows are ours; new ones are as the server drew them
            fresh = theta_of(broadcasts[-1], task.index + 1)
            x = fresh if x is None else np.concatenate([x, fresh[len(x) :]])
            # c is the mean over the clients met so far: a new one has zero.
            c = sum((padded(own, x) for own in variates.values()), np.zeros_like(x)) / len(met)
        models, changes = {}, []
        for k in present:
            c_k, taken = padded(variates.get(k), x), []

            def changed(g, v, c_k=c_k, taken=taken):
                taken.append(g)
                return g - c_k + c  # noqa: B023

            X, y = tasks[task.index][k]
            models[k], steps = train_locally(x, X.numpy(), y.numpy(), knobs, (task.index, round_, k), changed)
            # The mean of the gradients of the steps, each counting as often as momentum carries it into x - y.
            counts = [sum(momentum**j for j in range(steps - i)) for i in range(steps)]
            variates[k] = np.average(taken, axis=0, weights=counts)
            if not momentum:
                np.testing.assert_allclose(variates[k], c_k - c + (x - models[k]) / (steps * 0.1), atol=1e-12)
            changes.append(variates[k] - c_k)
        shares = [COUNTS[task.index][k] if weighting == "samples" else 1 for k in present]
        x = x + eta_g * (np.average([models[k] for k in present], axis=0, weights=shares) - x)
        c = c + len(present) / len(met) * np.mean(changes, axis=0)
        np.testing.assert_allclose(theta_of(server.network.state(), task.index + 1), x, atol=5e-6)
        for k, own in variates.items():
            np.testing.assert_allclose(
                padded(theta_of(states[k], sum("weight" in name for name in states[k]), "variate.0."), own),
                own,
                atol=2e-5,
            )


def test_running_statistics_have_no_variate_and_are_averaged():
    method = Scaffold(Training(**SMALL), eta_g=0.5)
    for _, _, server, states, _ in rounds_of(method, tiny_context(), made_tasks([[9, 9]]), seen=lambda *_: None):
        names = [name for state in states.values() for name in state] + list(server.sums)
        assert not any("running_" in name for name in names)
    sent = []
    *_, (_, _, server, _, _) = rounds_of(
        method, tiny_context(), made_tasks([[9, 9]]), lambda *args: sent.append(args[2])
    )
    name = "body.stage1.1.running_var"
    torch.testing.assert_close(server.network.state()[name], (sent[-2][name] + sent[-1][name]) / 2)


@pytest.mark.slow
def test_twice_the_bytes_go_up_and_from_the_second_round_down():
    counts = COUNTS[:2]
    ours, plain = (
        federation_of(method, tiny_context(), made_tasks(counts))
        for method in (Scaffold(Training(**SMALL)), FedAvg(Training(**SMALL)))
    )
    for federation in (ours, plain):
        federation.run(lambda _: None)
    size = {0: 0, 1: 0}
    for name in ours.server.parameters():
        for task in size:
            size[task] += 4 * ours.server.network.get_parameter(name).numel() * (task == 1 or "heads.1" not in name)
    wanted = {(r.task, r.round, r.client): (r.up_bytes, r.down_bytes) for r in plain.state.ledger.uploads}
    for row in ours.state.ledger.uploads:
        up, down = wanted[row.task, row.round, row.client]
        assert row.stage == MODEL
        assert row.up_bytes == (up + size[row.task] if up else 0)
        # A new head has no variate in its first round.
        known = 0 if not up else size[row.task] if row.round else size[0] if row.task else 0
        assert row.down_bytes == down + known
    assert ours.state.client_storage_bytes == {"variate": size[1]}
    assert ours.server.report() == {"clients": 4}


def test_optimisers_whose_steps_tell_no_gradient_are_refused():
    with pytest.raises(UserError, match=r"^method\.training\.optimizer=adam: SCAFFOLD .*optimizer=sgd"):
        Scaffold(Training(optimizer="adam"))
    with pytest.raises(UserError, match=r"^method\.eta_g=0\.0 "):
        typed_instance(Scaffold, {"eta_g": 0.0}, "method")
