"""FedCBC against one autoencoder at a time in plain float64, its messages, and its limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.engine.validation import first_objection
from fcl_bench.errors import UserError
from fcl_bench.methods.autoencoders.fedcbc import FedCBC, VAETraining
from fcl_bench.methods.autoencoders.networks import keys, normals
from fcl_bench.randomness import derived_seed
from fcl_bench.typed import typed_instance
from tests.methods.classical_harness import INPUTS, SIZES, feature_tasks
from tests.methods.harness import draw_tasks, turn
from tests.methods.training_harness import federation_of, image_shard, images_stream, learn_images
from tests.methods.whole_runs import feature_context, learnt, same
from tests.training.class_vaes_oracle import (
    FIT,
    SMALL,
    plain_decoded,
    plain_fit,
    plain_fused,
    plain_loss,
    plain_parts,
    plain_posterior,
)

#: P of `SMALL`.
NUMBERS = SMALL.numbers
CONTEXT = feature_context(INPUTS)


def method(rounds: int = 2, fraction: float = 1.0, epochs: int = 2, **knobs) -> FedCBC:
    small = {"hidden": 4, "latent": 3, "samples": 6}
    return FedCBC(
        dataclasses.replace(FIT.training, rounds=rounds, fraction=fraction, epochs=epochs), **{**small, **knobs}
    )


def stream_key(purpose: str, column: int, *indices: int) -> torch.Tensor:
    return keys(derived_seed(CONTEXT.seed, f"vae {purpose}", *indices), torch.tensor([column]))


def wholly(method: FedCBC, tasks) -> dict[int, torch.Tensor]:
    """The autoencoder of each class after all tasks, by loops over everything."""
    everyone = torch.cat([Z for Z, _ in tasks[0] if len(Z)])
    low, high = everyone.amin(dim=0), everyone.amax(dim=0)
    held: dict[int, torch.Tensor] = {}
    own: dict[tuple[int, int], torch.Tensor] = {}
    for t, clients in enumerate(tasks):
        asked = int(t == 0)  # the rounds of the model come after the range's
        for round_ in range(asked, asked + method.training.rounds):
            uploads: dict[int, list[torch.Tensor]] = {}
            for k, (Z, labels) in enumerate(clients):
                x = ((Z - low) / (high - low)).clamp(0, 1)
                for c in sorted(set(labels.tolist())):
                    start = own.get((k, c), held.get(c, SMALL.initial(stream_key("start", c))[0]))
                    rows, wanted = x[labels == c].double(), None
                    if c in held:
                        teacher = plain_parts(held[c])
                        z = normals(stream_key("samples", c, t, round_, k), 18)
                        rows = torch.cat([rows, plain_decoded(teacher, z.view(6, 3).double())])
                        wanted = (method.alpha, *plain_posterior(teacher, rows)) if method.alpha else None
                    trained = plain_fit(start, rows, stream_key("training", c, t, round_, k), wanted, method)
                    own[k, c] = trained
                    uploads.setdefault(c, []).append(trained)
            for c, sent in uploads.items():
                teachers = sent + ([held[c]] if c in held else [])
                key = stream_key("fusion", c, t, round_)
                several = len(teachers) > 1
                made = plain_fused(teachers, key, c in held, method) if several else sent[0]
                held[c] = made
    return held


# What is learnt -------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("{'alpha': 0.0}-True", "{'alpha': 2.0}-True", "{}-False")
@pytest.mark.parametrize(("knobs", "recurring"), [({}, False), ({"alpha": 2.0}, True), ({"alpha": 0.0}, True)], ids=str)
def test_a_whole_run_is_what_the_equations_say(knobs, recurring):
    tasks, ours = feature_tasks(recurring), method(**knobs)
    server = learnt(ours, CONTEXT, tasks).server
    expected = wholly(ours, tasks)
    assert server.bank.columns.tolist() == sorted(expected)
    for column, weights in zip(server.bank.columns.tolist(), server.bank.weights, strict=True):
        np.testing.assert_allclose(weights, expected[column], atol=2e-4)
        assert float((weights - SMALL.initial(stream_key("start", column))[0]).abs().max()) > 0.01


def test_scores_are_the_losses_at_the_posterior_mean():
    server = learnt(method(), CONTEXT, feature_tasks()).server
    Z = torch.randn(9, INPUTS, dtype=torch.float64)
    x = ((Z - server.low) / (server.high - server.low)).clamp(0, 1)
    for column, weights in enumerate(server.bank.weights):
        np.testing.assert_allclose(
            -server.predict(Z)[:, column], plain_loss(plain_parts(weights), x, None, 0.5)[0], rtol=1e-4
        )


@pytest.mark.slow
def test_classes_that_lie_apart_are_told_and_nothing_of_a_class_that_does_not_come_back_is_forgotten():
    rng, sizes = np.random.default_rng(1), [[40, 30, 20]] * 3
    tasks = [
        [(torch.from_numpy(3 * Z), torch.from_numpy(y)) for Z, y in c] for c in draw_tasks(rng, 8, [2, 2, 2], sizes)
    ]
    knobs = VAETraining(rounds=2, epochs=30, batch_size=16, lr=0.02)
    ours, found = FedCBC(knobs, hidden=16, latent=4, samples=30), []

    def look(task, server):
        found.append([server.predict(torch.cat([Z for Z, _ in clients])) for clients in tasks[: task.index + 1]])
        found[-1].append(server.bank)

    learn_images(ours, feature_context(8), tasks, after=look)
    labels = [torch.cat([y for _, y in clients]) for clients in tasks]
    right = [(scores.argmax(dim=1) == y).double().mean() for scores, y in zip(found[-1], labels, strict=False)]
    assert min(right) > 0.9
    for t in range(3):
        for later in found[t + 1 :]:
            # A sample's scores for the classes that there were stay: all that is forgotten is to rivals.
            old = later[t][:, : 2 * t + 2]
            np.testing.assert_allclose(old, found[t][t], rtol=1e-5)
            assert torch.equal(old.argmax(dim=1), found[t][t].argmax(dim=1))
            assert torch.equal(later[-1].weights[: 2 * t + 2], found[t][-1].weights)


def test_the_autoencoder_of_a_single_client_is_taken_as_it_is_and_then_fused_with_what_is_known():
    tasks, sent = [[(torch.rand(9, INPUTS).double(), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1]))]], []
    for rounds in (1, 2):
        server = learn_images(method(rounds), CONTEXT, tasks, seen=lambda *told: sent.append(told[2]))
        parts = torch.cat([sent[-1][name].movedim(-1, 0).flatten(1) for name in SMALL.shapes], dim=1)
        assert torch.equal(server.bank.weights, parts) == (rounds == 1)
        assert list(server.versions.values()) == [rounds] * 2


def test_a_client_goes_on_from_its_own_and_keeps_them_apart_from_what_it_is_given():
    tasks, ours = feature_tasks(), method()
    server, client, states = ours.server(CONTEXT), ours.client(CONTEXT), {}
    [task, *_] = images_stream(tasks)
    client_data = image_shard(0, 0, *tasks[0][0])
    server.start_task(task)
    server.low, server.high = torch.zeros(INPUTS), torch.ones(INPUTS)
    broadcast = dataclasses.replace(server.broadcast(task, 1), stage="model")
    first = turn(client, client_data, broadcast, states)
    kept = {name: value.clone() for name, value in states[0].items()}
    assert set(kept) == {"vaes.columns", "vaes.weights"}
    again, back = turn(client, client_data, broadcast, states), states[0]
    assert not same(first.tensors, again.tensors)
    assert same(turn(client, client_data, broadcast).tensors, first.tensors)
    [before] = [dict(kept)]
    client.update(client_data, broadcast, before)
    assert same(before, kept)
    assert not same(back, kept)


@pytest.mark.slow
def test_without_alpha_no_posterior_is_asked_for(monkeypatch):
    def never(*_):
        raise AssertionError

    for module in ("fitting", "fedcbc"):
        monkeypatch.setattr(f"fcl_bench.methods.autoencoders.{module}.posteriors", never)
    learnt(method(alpha=0.0), CONTEXT, feature_tasks(True))
    with pytest.raises(AssertionError):
        learnt(method(), CONTEXT, feature_tasks(True))


# Scaling --------------------------------------------------------------------------------------------------------------


def test_the_range_is_everyones_in_the_first_task_and_later_features_are_clipped():
    tasks = feature_tasks()
    server = learnt(method(1, epochs=1), CONTEXT, tasks).server
    everyone = torch.cat([Z for Z, _ in tasks[0]]).float()
    assert torch.equal(server.low, everyone.amin(dim=0))
    assert torch.equal(server.high, everyone.amax(dim=0))
    scaled = server.scaled(torch.cat([Z for Z, _ in tasks[0]]), server.low, server.high)
    np.testing.assert_allclose([scaled.min(), scaled.max()], [0, 1], atol=1e-6)
    beyond = torch.stack([server.low - 1, server.high + 1, (server.low + server.high) / 2]).double()
    np.testing.assert_allclose(server.scaled(beyond, server.low, server.high)[:, 0], [0, 1, 0.5], atol=1e-6)


@pytest.mark.slow
def test_a_feature_that_never_varies_is_finite():
    tasks = [[(Z.clone(), y) for Z, y in clients] for clients in feature_tasks()]
    for Z, _ in tasks[0]:
        Z[:, 2] = 4.0
    server = learnt(method(), CONTEXT, tasks).server
    assert bool(torch.isfinite(server.predict(torch.cat([Z for Z, _ in tasks[1]]))).all())


# Messages -------------------------------------------------------------------------------------------------------------


def upload_bytes(held: int, wire: str) -> int:
    """h (P numbers and 4 bytes); in a 16-bit type with a scale for each column of a weight and each bias."""
    number = {"float32": 4, "float16": 2}[wire]
    scales = sum(shape[1] if len(shape) > 1 else 1 for shape in SMALL.shapes.values()) if number == 2 else 0
    return held * (number * NUMBERS + 4 * scales + 4)


@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_bytes_are_a_hand_count(wire):
    """Up: a client's classes. Down: what has changed since its last turn, all that it has missed included."""
    tasks, context = feature_tasks(True), feature_context(INPUTS, wire=wire)
    ledger = learnt(method(), context, tasks).state.ledger
    number = 4  # vectors stay in float32
    known: dict[int, int] = {}
    had: dict[int, dict[int, int]] = {}
    ranged = set()
    rows = {(row.task, row.round, row.client): row for row in ledger.uploads}
    for t, clients in enumerate(tasks):
        for round_ in range(2 + (t == 0)):
            present = [k for k, (_, labels) in enumerate(clients) if len(labels)]
            for k in present:
                row = rows[t, round_, k]
                if t == round_ == 0:
                    assert (row.stage, row.up_bytes, row.down_bytes) == ("range", 2 * number * INPUTS, 0)
                    continue
                news = sum(had.setdefault(k, {}).get(c) != version for c, version in known.items())
                once = 0 if k in ranged else 2 * 4 * INPUTS
                assert row.down_bytes == 8 + 4 * NUMBERS * news + once
                assert row.up_bytes == upload_bytes(len(set(clients[k][1].tolist())), wire)
                had[k] = dict(known)
                ranged.add(k)
            if (t, round_) != (0, 0):
                for c in {label for k in present for label in clients[k][1].tolist()}:
                    known[c] = known.get(c, 0) + 1


def test_a_class_of_512_features_costs_1_45_megabytes():
    ours, context = FedCBC(VAETraining(1, epochs=1)), feature_context(512)
    tasks = [
        [(torch.rand(4, 512).double(), torch.tensor([0, 0, 1, 1])), (torch.rand(2, 512).double(), torch.tensor([1, 1]))]
    ]
    federation = learnt(ours, context, tasks)
    sent = {row.client: row.up_bytes for row in federation.state.ledger.uploads if row.stage == "model"}
    assert sent == {0: 2 * (1_446_912 + 4), 1: 1_446_912 + 4}
    assert federation.server.report() == {"vae_bytes": 1_446_912, "classes": 2}
    assert federation.state.client_storage_bytes == {"vaes": 2 * (1_446_912 + 8)}


@pytest.mark.parametrize(
    ("classes", "said"), [([0, 0], "names something twice"), ([0, 4], "holds 4"), ([0, 2], "")], ids=str
)
def test_classes_that_a_client_cannot_have_are_refused(classes, said):
    tasks, ours = feature_tasks(), method()
    server = learn_images(ours, CONTEXT, tasks[:1])
    [task, *_] = images_stream(tasks)
    server.start_task(dataclasses.replace(task, columns=(0, 1, 2), columns_seen=5))
    wanted = {"classes": server.schema(task, server.broadcast(task, 1).stage)["classes"]}
    objection = first_objection({"classes": torch.tensor(classes)}, wanted)
    assert said in " ".join(objection or ("",))


# Streams --------------------------------------------------------------------------------------------------------------


def test_a_class_without_a_labelled_sample_is_never_named():
    """Until somebody has one; nobody says how far features reach in a first task without labels."""
    tasks = feature_tasks()
    whole = [(0, k) for k in range(3)]
    federation = federation_of(method(), CONTEXT, tasks, unlabelled=whole)
    federation.run(lambda _: None)
    server = federation.server
    scores = server.predict(torch.cat([Z for Z, _ in tasks[1]]))
    assert server.bank.columns.tolist() == [3, 4, 5, 6]
    assert 1 in server.query_tasks
    assert 2 not in server.query_tasks
    assert bool(torch.isfinite(scores).all())
    assert int(scores.argmax(dim=1).min()) >= 3
    assert bool((scores[:, :3] < -1e30).all())


@pytest.mark.slow
def test_a_fraction_of_the_clients_takes_part_and_everyone_says_its_range():
    tasks = draw_tasks(np.random.default_rng(0), INPUTS, [3, 2], [[8] * 6] * 2)
    tasks = [[(torch.from_numpy(Z), torch.from_numpy(y)) for Z, y in clients] for clients in tasks]
    uploads = learnt(method(3, 0.5), CONTEXT, tasks).state.ledger.uploads
    counted = {}
    for row in uploads:
        if row.up_bytes:
            counted.setdefault((row.task, row.round), []).append(row.client)
    assert {key: len(clients) for key, clients in counted.items()} == {
        **{(0, 0): 6},
        **{(0, r): 3 for r in (1, 2, 3)},
        **{(1, r): 3 for r in (0, 1, 2)},
    }
    assert len({tuple(clients) for clients in counted.values()}) > 2


@pytest.mark.slow
def test_another_seed_is_another_run_and_the_same_is_the_same():
    ends = [learnt(method(), feature_context(INPUTS, seed=seed), feature_tasks()).server for seed in (0, 0, 1)]
    assert same(ends[0].state_dict(), ends[1].state_dict())
    assert not torch.equal(ends[0].bank.weights, ends[2].bank.weights)


# Knobs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{"alpha": -1}, {"samples": 0}, {"latent": 0}], ids=str)
def test_wrong_knobs_name_the_key(knobs):
    with pytest.raises(UserError, match=rf"method\.{next(iter(knobs))}"):
        typed_instance(FedCBC, knobs, "method")


def test_training_that_diverges_names_its_rate():
    diverging = dataclasses.replace(method(), training=VAETraining(1, epochs=3, lr=1e30))
    with pytest.raises(UserError, match=r"method\.training\.lr=1e\+30: training diverged"):
        learnt(diverging, CONTEXT, feature_tasks())


def test_more_classes_than_memory_holds_are_refused_before_work_begins():
    with pytest.raises(UserError, match=r"method\.hidden=100000"):
        FedCBC(hidden=100_000, latent=100_000).check(CONTEXT, [10] * 10)


def test_client_one_of_the_made_stream_misses_a_task():
    """What the byte count and the oracle rely on."""
    assert SIZES[1][1] == 0
    assert SIZES[0][2] == 0
