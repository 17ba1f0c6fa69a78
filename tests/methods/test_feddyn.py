"""FedDyn: known fixed points, what clients and server agree on, plain NumPy, and L-BFGS on all samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_digits

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.feddyn import SIZES, FedDyn
from fcl_bench.methods.averaging.fedprox import FedProx
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.training.knobs import Training
from fcl_bench.typed import typed_instance
from tests.methods.drift_harness import (
    COUNTS,
    EXACT,
    SMALL,
    loss_gradient,
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
from tests.methods.training_harness import feature_tasks, federation_of, learn_images, tiny_context
from tests.methods.whole_runs import feature_context

# Fixed points ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("False-sizes1-3.0", "True-sizes2-3.6")
@pytest.mark.parametrize(
    ("scaled", "sizes", "optimum"), [(False, (2, 2), 3.0), (False, (2, 6), 3.0), (True, (2, 6), 3.6)]
)
def test_scalar_quadratics_come_to_the_optimum_of_all_clients_or_of_all_samples(scaled, sizes, optimum):
    """w* solves n_1 w + 3 n_2 (w - 4) = 0, with n_1 = n_2 unless scaled; g_k is each client's gradient there."""
    training = Training(rounds=40, weighting="uniform", **{**EXACT, "epochs": 8})
    server, states = play_scalar(
        with_loss(FedDyn, quadratic)(training, trains="features", alpha=0.5, scaled=scaled), sizes
    )
    assert weight_of(server) == pytest.approx(optimum, abs=2e-5)
    mean = sum(sizes) / 2
    alphas = [0.5 * mean / n if scaled else 0.5 for n in sizes]
    g = [-alpha * float(states[k]["drift.0.heads.0.weight"]) for k, alpha in enumerate(alphas)]
    np.testing.assert_allclose(g, [optimum, 3 * (optimum - 4)], atol=1e-4)
    assert float(server.mean("heads.0.weight")) == pytest.approx(0, abs=1e-5)


@pytest.mark.slow_cases("False", "True")
@pytest.mark.parametrize("scaled", [True, False])
def test_it_comes_to_the_optimum_that_lbfgs_finds_on_all_samples(scaled):
    """F(w) = sum_k p_k f_k(w) + (decay / 2) ||w||^2, p_k = n_k / n or 1 / N.

    The distance to w* falls geometrically here, to a tenth in some 45 rounds, down to about 2e-6, where weights in
    float32 end it: from 1 at the start it is below 1e-4 after 120 rounds. FedAvg stays 100 times farther away.
    """
    decay, sizes = 0.05, [30, 12, 5]
    context, [clients] = feature_context(4), feature_tasks(3, [3], [sizes], inputs=4)
    rng = np.random.default_rng(0)
    clients = [
        (X, torch.from_numpy(rng.integers(0, 3, len(y)) if k == 2 else y.numpy())) for k, (X, y) in enumerate(clients)
    ]
    shares = np.array(sizes) / sum(sizes) if scaled else np.full(3, 1 / 3)

    def pooled(theta):
        w = theta.reshape(3, 5)
        parts = [loss_gradient(w, X.numpy(), y.numpy()) for X, y in clients]
        loss = sum(p * part[0] for p, part in zip(shares, parts, strict=True)) + decay / 2 * (w**2).sum()
        return loss, (sum(p * part[1] for p, part in zip(shares, parts, strict=True)) + decay * w).ravel()

    best = minimize(pooled, np.zeros(15), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10}).x
    knobs = {"epochs": 5, "batch_size": 64, "lr": 0.2, "weight_decay": decay, "augment": "none"}
    dynamic, averaging = Training(rounds=120, weighting="uniform", **knobs), Training(rounds=40, **knobs)
    averaging.weighting = "samples" if scaled else "uniform"
    found = {}
    for name, method in (
        ("feddyn", FedDyn(dynamic, trains="features", alpha=0.3, scaled=scaled)),
        ("fedavg", FedAvg(averaging, trains="features")),
    ):
        *_, (_, _, server, _, _) = rounds_of(method, context, [clients])
        found[name] = np.abs(theta_of(server.network.state(), 1).ravel() - best).max()
    assert found["feddyn"] < 2e-4
    assert found["fedavg"] > 100 * found["feddyn"]


@pytest.mark.slow_cases("0", "1", "2")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_classes_per_client_cost_it_less_than_fedavg(seed):
    """The digits in 20 shards by class, two for each of ten clients, 30 rounds: the loss on all samples."""
    images, labels = load_digits(return_X_y=True)
    images, rng = images / 16, np.random.default_rng(seed)
    shards = np.array_split(np.argsort(labels, kind="stable"), 20)
    dealt = [np.concatenate([shards[a], shards[b]]) for a, b in rng.permutation(20).reshape(10, 2)]
    clients = [(torch.from_numpy(images[own]), torch.from_numpy(labels[own])) for own in dealt]
    knobs = Training(rounds=30, epochs=1, batch_size=64, lr=0.2, weight_decay=0.0, augment="none")
    loss = {}
    for method in (FedDyn(knobs, trains="features", alpha=0.1), FedAvg(knobs, trains="features")):
        *_, (_, _, server, _, _) = rounds_of(method, feature_context(64), [clients])
        loss[method.name], _ = loss_gradient(theta_of(server.network.state(), 1), images, labels)
    assert loss["feddyn"] < 0.3 * loss["fedavg"]


# What clients and server agree on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_h_is_the_mean_of_all_clients_linear_terms_after_every_round(fraction, reset):
    """h = -alpha S / N = mean_k g_k, whoever took part, also where clients come later and heads grow."""
    method = FedDyn(Training(fraction=fraction, **SMALL), trains="features", alpha=0.4, scaled=False, reset=reset)
    rounds = 0
    met: set[int] = set()
    for task, round_, server, states, _ in rounds_of(method, feature_context(), feature_tasks(0, [3, 2, 2], COUNTS)):
        available = {k for k, n in enumerate(COUNTS[task.index]) if n}
        met = available if reset and round_ == 0 else met | available
        assert server.met == met
        prefix = f"drift.{task.index if reset else 0}."
        for name in server.sums:
            of = [state[prefix + name].double() for state in states.values() if prefix + name in state]
            mean_g = -0.4 * sum(of) / len(met)
            torch.testing.assert_close(-0.4 * server.mean(name), mean_g, rtol=0, atol=1e-6)
            rounds += 1
        assert set(server.sums) >= set(server.parameters())
    assert rounds > 20


def test_clients_that_do_not_take_part_keep_what_they_have_bit_for_bit():
    method = FedDyn(Training(fraction=0.5, **SMALL), alpha=0.4, scaled=False)
    before: dict = {}
    away = 0
    for _, _, _, states, present in rounds_of(method, tiny_context(), made_tasks(COUNTS[:2])):
        for k, state in before.items():
            assert (state.keys() == states[k].keys() and not differing(state, states[k])) == (k not in present)
            away += k not in present
        before = {k: {name: value.clone() for name, value in state.items()} for k, state in states.items()}
    assert away


@pytest.mark.slow_cases("images")
@pytest.mark.parametrize("trains", ["images", "features"])
def test_the_clients_first_round_is_fedprox_with_mu_alpha_bit_for_bit(trains):
    """g_k = h = 0 there, and so is the model that predicts; the next broadcast moves on by the mean drift once more."""
    knobs = Training(**{**SMALL, "rounds": 1, "epochs": 4, "momentum": 0.5, "augment": "crop_flip"})
    tasks = made_tasks(COUNTS[:1]) if trains == "images" else feature_tasks(0, [3], COUNTS[:1])
    context = tiny_context() if trains == "images" else feature_context()
    sent: dict[str, dict] = {"dyn": {}, "prox": {}}
    servers = {}
    for name, method in (
        ("dyn", FedDyn(knobs, trains=trains, alpha=0.5, scaled=False, max_norm=None)),
        ("prox", FedProx(knobs, trains=trains, mu=0.5)),
    ):
        servers[name] = learn_images(
            method, context, tasks, seen=lambda k, _, up, name=name: sent[name].update({k: up})
        )
    assert sent["dyn"].keys() == sent["prox"].keys() == {0, 1, 3}
    assert all(not differing(dict(sent["dyn"][k]), dict(sent["prox"][k])) for k in sent["dyn"])
    start, task = method.server(context), next(iter(rounds_of(method, context, tasks)))[0]
    start.start_task(task)
    first, dyn, prox = (server.network.state() for server in (start, servers["dyn"], servers["prox"]))
    assert not differing(dyn, prox)
    again = servers["dyn"].broadcast(task, 0)
    for name in servers["dyn"].parameters():
        torch.testing.assert_close(again[name] - first[name], 2 * (prox[name] - first[name]), rtol=1e-4, atol=1e-6)


# Plain NumPy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scaled", "max_norm"), [(False, None), (True, 10.0), (True, 0.3)])
def test_rounds_over_two_tasks_are_those_of_plain_numpy(scaled, max_norm):
    """Growing heads, absent clients, mini-batches, momentum, decay, clipping."""
    alpha = 0.6
    knobs = Training(**{**SMALL, "rounds": 2, "momentum": 0.5, "weight_decay": 0.02, "fraction": 0.7, "lr": 0.1})
    method = FedDyn(
        knobs, trains="features", alpha=alpha, scaled=scaled, max_norm=max_norm, reset=False, loss_classes="seen"
    )
    context, tasks = feature_context(), feature_tasks(1, [3, 2], COUNTS[:2])
    mean, drifts, met = None, {}, set()
    broadcasts = []
    for task, round_, server, _, present in rounds_of(
        method, context, tasks, seen=lambda *args: broadcasts.append(args[1])
    ):
        counts = {k: len(y) for k, (_, y) in enumerate(tasks[task.index]) if len(y)}
        met |= counts.keys()
        if server.stage == SIZES:
            assert sorted(present) == sorted(counts)
            continue
        of_model = round_ - (1 if scaled else 0)
        if of_model == 0:  # old rows are ours; new ones are as the server drew them
            fresh = theta_of(broadcasts[-1], task.index + 1)
            mean = fresh if mean is None else np.concatenate([mean, fresh[len(mean) :]])
        h = -alpha * sum((padded(drift, mean) for drift in drifts.values()), np.zeros_like(mean)) / len(met)
        w, trained = mean - h / alpha, []
        for k in present:
            a = alpha * np.mean(list(counts.values())) / counts[k] if scaled else alpha
            g_k = -a * padded(drifts.get(k), w)

            def changed(g, v, a=a, g_k=g_k):
                whole = g + a * (v - w) - g_k  # noqa: B023
                norm = np.linalg.norm(whole)
                return whole if max_norm is None or norm <= max_norm else whole * (max_norm / (norm + 1e-6))

            X, y = tasks[task.index][k]
            mine, _ = train_locally(w, X.numpy(), y.numpy(), knobs, (task.index, of_model, k), changed)
            drifts[k] = padded(drifts.get(k), w) + mine - w
            trained.append(mine)
        mean = np.mean(trained, axis=0)
        np.testing.assert_allclose(theta_of(server.network.state(), task.index + 1), mean, atol=5e-6)


# Knobs, bytes, states -------------------------------------------------------------------------------------------------


def test_a_step_is_clipped_to_the_norm_asked_for():
    """One step of one client moves the model by lr * max_norm; the server doubles it."""
    knobs = Training(**{**SMALL, "rounds": 1, "epochs": 1, "batch_size": 64})
    moved = {}

    def seen(_, broadcast, upload):
        moved[norm] = float(sum((upload[name] - broadcast[name]).square().sum() for name in upload)) ** 0.5

    for norm in (0.01, 10.0, None):
        method = FedDyn(knobs, trains="features", scaled=False, max_norm=norm)
        learn_images(method, feature_context(), feature_tasks(0, [3], [[30]]), seen=seen)
    assert moved[0.01] == pytest.approx(0.05 * 0.01, rel=1e-3)
    assert moved[10.0] == moved[None] > 0.05 * 0.02


@pytest.mark.slow_cases("False", "True")
@pytest.mark.parametrize("scaled", [True, False])
def test_bytes_are_fedavgs_and_clients_keep_one_model(scaled):
    counts = COUNTS[:2]
    dyn, plain = (
        federation_of(method, tiny_context(), made_tasks(counts))
        for method in (FedDyn(Training(**SMALL), scaled=scaled, reset=False), FedAvg(Training(**SMALL)))
    )
    for federation in (dyn, plain):
        federation.run(lambda _: None)

    def of(federation, stage):
        rows = [r for r in federation.state.ledger.uploads if r.stage == stage]
        first = min((r.round for r in rows), default=0)
        return {(r.task, r.round - first, r.client): (r.up_bytes, r.down_bytes) for r in rows if r.up_bytes}

    wanted = of(plain, MODEL)
    for (task, round_, client), (up, down) in of(dyn, MODEL).items():
        told = 8 if scaled and round_ == 0 else 0  # the mean number of samples, once per task
        assert (up, down - told) == wanted.pop((task, round_, client))
    assert not wanted
    sizes = of(dyn, SIZES)
    assert len(sizes) == (6 if scaled else 0)
    assert all(up == 8 and down == 4 * (task + 1) for (task, _, _), (up, down) in sizes.items())
    parameters = sum(dyn.server.network.get_parameter(name).numel() for name in dyn.server.parameters())
    told = {"received": 8} if scaled else {}  # the mean number of samples, through the task
    assert dyn.state.client_storage_bytes == {"drift": 4 * parameters, **told}
    assert dyn.server.report() == {"clients": 4}


def test_sizes_that_are_not_told_are_refused():
    method = FedDyn(Training(**SMALL), trains="features")
    server = method.server(feature_context())
    [(task, *_), *_] = rounds_of(method, feature_context(), feature_tasks(0, [3], [[30]]))
    server.start_task(task)
    upload = server.broadcast(task, 0).with_tensors({})
    assert "how many samples" in server.objection(upload)


@pytest.mark.slow
def test_a_reset_forgets_at_a_task_and_nowhere_else():
    found = {}
    for reset in (False, True):
        method = FedDyn(Training(**SMALL), alpha=0.4, scaled=False, reset=reset)
        *_, (_, _, server, states, _) = rounds_of(method, tiny_context(), made_tasks(COUNTS[:2]))
        found[reset] = server
        assert {name.split(".")[1] for name in states[0]} == ({"1"} if reset else {"0"})
        assert server.met == ({0, 2, 3} if reset else {0, 1, 2, 3})
    assert differing(state_of(found[False]), state_of(found[True]))


@pytest.mark.parametrize(("name", "value"), [("alpha", 0.0), ("max_norm", 0.0)])
def test_impossible_knobs_are_refused_with_their_key(name, value):
    with pytest.raises(UserError, match=rf"^method\.{name}=0\.0 "):
        typed_instance(FedDyn, {name: value}, "method")
