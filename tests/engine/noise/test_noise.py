"""The noise itself: its variance and form in every field, its streams, and what clipping does to a model update."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import Codec
from fcl_bench.engine.exchange import Arrival
from fcl_bench.engine.validation import BadUpload, validate_upload
from fcl_bench.linalg.structure import noise_room
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.fedlda import FedLDA
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.options.noise.gaussian import Gaussian
from fcl_bench.options.noise.mechanism import DPMechanism, NoisyStatistics, NoisyUpdates, simulated
from fcl_bench.protocol.fields import COLUMN, COUNT, SQUARE, SampleCounts, Uploads
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from tests.engine.noise.test_sensitivity import METHODS, TASK, noisy_context, upload_of
from tests.methods.harness import context_of, learn, random_tasks

RELEASE = DPMechanism(1.0, {"G": SQUARE, "S": COLUMN, "n": COUNT}, {"G": 2.0, "S": 3.0, "n": 40.0})


def noise_of(client: int = 0, task: int = 0, round_: int = 0, seed: int = 0) -> Message:
    """What is added to zeros."""
    zeros = {"G": torch.zeros(30, 30), "S": torch.zeros(30, 20), "n": torch.zeros(20, dtype=torch.int32)}
    return NoisyStatistics(simulated(seed), RELEASE).send(Message(zeros, task=task, round=round_), client)


def test_the_noise_has_the_variance_and_the_form_of_its_field():
    drawn = [noise_of(client) for client in range(300)]
    G, S, n = (torch.stack([own[name] for own in drawn]).double().numpy() for name in ("G", "S", "n"))
    assert np.array_equal(G, G.transpose(0, 2, 1)), "a symmetric matrix stays one"
    upper = np.triu_indices(30, 1)
    for values, deviation in (
        (np.diagonal(G, axis1=1, axis2=2), 2.0),
        (G[:, upper[0], upper[1]], 2.0 / math.sqrt(2)),
        (S, 3.0),
        (n, math.sqrt(40**2 + 1 / 12)),
    ):
        count = values.size
        assert abs(values.mean()) < 5 * deviation / math.sqrt(count)
        assert values.std() == pytest.approx(deviation, rel=5 / math.sqrt(2 * count))
    beside = np.corrcoef(G[:, upper[0], upper[1]][:, :200].T)
    assert np.abs(beside - np.eye(200)).max() < 6 / math.sqrt(300), "entries are independent"
    assert np.array_equal(n, n.round())
    assert n.min() < 0
    assert {value.dtype for value in noise_of().values()} == {torch.float32, torch.int32}


def test_the_spectral_norm_of_the_noise_is_what_the_solve_allows_for():
    release = DPMechanism(1.0, {"G": SQUARE}, {"G": 0.5})
    for uploads in (1, 16):
        total = sum(
            NoisyStatistics(simulated(0), release).send(Message({"G": torch.zeros(400, 400).double()}), k)["G"]
            for k in range(uploads)
        )
        norm = float(torch.linalg.eigvalsh(total).abs().max())
        assert norm == pytest.approx(release.edge(400, uploads), rel=0.05)
        if uploads == 1:
            assert norm < noise_room(0.5, 400)


def test_every_upload_has_a_stream_of_its_own():
    """The same again after an interruption; another one for any other client, task, round or seed."""
    first = noise_of()
    assert all(torch.equal(first[name], noise_of()[name]) for name in first)
    for other in (noise_of(client=1), noise_of(task=1), noise_of(round_=1), noise_of(seed=1)):
        assert not any(torch.equal(first[name], other[name]) for name in first)


def test_shares_of_the_noise_of_counts_are_not_rounded_away():
    """A hundredth of the variance is less than half a count: each client's own, rounded, would be no noise at all."""
    release = DPMechanism(1.0, {"n": COUNT}, {"n": 0.1}, shared=True)
    step, uploads, counts = NoisyStatistics(simulated(0), release), 100, torch.full((2000,), 7, dtype=torch.int32)
    total = sum(step.send(Message({"n": counts}), client)["n"] for client in range(uploads))
    assert float((total - 700).std()) == pytest.approx(1.0, rel=0.05)
    whole = release.counted(Message({"n": total}))["n"]
    assert whole.dtype == torch.int64
    assert torch.equal(whole, total.round().long())
    assert release.counted(Message({"n": counts}))["n"] is counts


def test_models_that_come_with_their_weight_are_clipped_without_it():
    plain, weighted = (
        NoisyUpdates(simulated(0), clip=0.5, deviation=0.1, weighted=weighted) for weighted in (False, True)
    )
    trained = {name: start + 1 for name, start in START.items()}
    for step in (plain, weighted):
        step.receive(Message(START), 0)
    one = plain.send(Message(trained, samples=7), 0)
    seven = weighted.send(Message({name: 7 * own.double() for name, own in trained.items()}, samples=7), 0)
    assert all(torch.allclose(seven[name], 7 * one[name].double(), atol=1e-5) for name in one)


def test_counts_beyond_their_type_stay_in_it():
    wild = DPMechanism(1.0, {"n": COUNT}, {"n": 1e15})
    n = NoisyStatistics(simulated(0), wild).send(Message({"n": torch.zeros(50, dtype=torch.int32)}), 0)["n"]
    assert n.dtype == torch.int32
    assert set(n.tolist()) == {2**31 - 1, -(2**31)}


@pytest.mark.parametrize("method", [STSA(M=None, gamma=1.0), STSA(M=12, gamma=1.0), FedLDA()], ids=lambda m: m.name)
@pytest.mark.parametrize("multiplier", [1e-10, 0.3, 50.0])
def test_honest_noisy_uploads_are_admitted_and_false_ones_are_not(method, multiplier):
    context, rng = noisy_context(method, multiplier=multiplier), np.random.default_rng(0)
    server = method.server(context)
    server.start_task(TASK)
    expected = server.schema(TASK, "statistics")
    codec = Codec(Uploads.of(method, context), None, context.dtype, context.device)
    step = NoisyStatistics(simulated(0), context.release)

    def taken(upload: Message) -> Message:
        return validate_upload(Arrival(0, upload), expected, codec, server)

    for client in range(20):
        upload = upload_of(method, context, rng.standard_normal((9, 4)), rng.integers(0, 3, 9))
        server.absorb(client, taken(step.send(dataclasses.replace(upload, task=0), client)))
    server.finish_task()
    assert bool(torch.isfinite(server.model()["W"]).all())
    room = context.release.deviation["G"] * (math.sqrt(2 * server.dimension) + 8)
    noisy = step.send(upload, 0)
    for false in (
        {"G": noisy["G"] - (100 * room + 10) * torch.eye(server.dimension)},
        {"G": noisy["G"] + (100 * room + 10) * torch.eye(server.dimension).roll(1, 0)},
        {"G": noisy["G"] * torch.nan},
        {"G": noisy["G"][:3, :3]},
    ):
        with pytest.raises(BadUpload, match="G "):
            taken(noisy.with_tensors({**noisy, **false}))
    if "n" in noisy:
        with pytest.raises(BadUpload, match="n holds -1e"):
            taken(noisy.with_tensors({**noisy, "n": torch.full_like(noisy["n"], -(10**8))}))


@pytest.mark.parametrize("multiplier", [0.0, 0.3])
def test_no_upload_is_larger_than_clipped_samples_and_noise_explain(multiplier):
    """What bounds a client's share: honest uploads pass, also where every sample has the largest length."""
    method, rng = FedLDA(), np.random.default_rng(1)
    context = noisy_context(method, multiplier=multiplier)
    server, clip = method.server(context), context.release.clip
    server.start_task(TASK)
    codec = Codec(Uploads.of(method, context), None, context.dtype, context.device)
    step = NoisyStatistics(simulated(0), context.release)
    deviation = context.release.deviation

    def taken(upload: Message) -> Message:
        arrival = Arrival(0, upload, SampleCounts(9, 9))
        return validate_upload(arrival, server.schema(TASK, "statistics"), codec, server)

    for client in range(100):
        samples = rng.standard_normal((9, 4)) * 10.0 ** rng.integers(-2, 3)
        upload = upload_of(method, context, samples, rng.integers(0, 3, 9))
        taken(step.send(dataclasses.replace(upload, task=0), client))
    # FedLDA's G and S of 9 samples that all are as long as they may be, and of 10.
    h = clip * torch.tensor([0.6, 0.8, 0.0, 0.0], dtype=torch.float64)
    for samples in (9, 10):
        S = torch.zeros(4, 3, dtype=torch.float64)
        S[:, 1] = samples * h
        sums = {"G": samples * torch.outer(h, h), "S": S, "n": torch.tensor([0, 9, 0]).to(upload["n"])}
        most = upload.with_tensors({**upload, **sums})
        if samples == 9:
            taken(most)
        elif multiplier == 0:
            with pytest.raises(BadUpload, match="G has the trace .* 9 samples that are no longer than 0.7"):
                taken(most)
    room = 8 * max(deviation.values(), default=0.0) * 10
    honest = step.send(dataclasses.replace(upload, task=0), 0)
    for name, larger, words in (
        ("G", (9 * clip**2 + room) * torch.eye(4), "G has the trace"),
        ("S", (9 * clip + room) * torch.ones(4, 3), "S has columns of together"),
        ("n", torch.full((3,), 10 + int(room)), "n counts"),
    ):
        with pytest.raises(BadUpload, match=words):
            taken(honest.with_tensors({**honest, name: larger.to(honest[name])}))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name}-{method.M}")
def test_the_largest_honest_upload_is_admitted(method):
    """Of AFL, too, whose Gram matrices have the regulariser of each client on their diagonals."""
    context, rng = noisy_context(method, multiplier=0.0, clip=1e-3), np.random.default_rng(1)
    server, wanted = method.server(context), method.uploads(context)["statistics"]
    server.start_task(TASK)
    codec = Codec(Uploads.of(method, context), None, context.dtype, context.device)
    schema, labels = server.schema(TASK, "statistics"), rng.integers(0, 3, 9)
    upload = dataclasses.replace(upload_of(method, context, 1 + rng.random((9, 4)), labels), task=0)
    twice = upload.with_tensors({name: upload[name] + upload[name] for name in upload})
    validate_upload(Arrival(0, upload, SampleCounts(9, 9)), schema, codec, server)
    validate_upload(Arrival(0, dataclasses.replace(twice, clients=2), SampleCounts(18, 18), 2), schema, codec, server)
    name = next(name for name, own in wanted.items() if own.one_sample == SQUARE or own.one_sample == COLUMN)
    larger = upload.with_tensors({**upload, name: upload[name] + 2 * 9 * 1e-3 * torch.ones_like(upload[name])})
    with pytest.raises(BadUpload, match=f"{name} has"):
        validate_upload(Arrival(0, larger, SampleCounts(9, 9)), schema, codec, server)


@pytest.mark.parametrize("method", [STSA(M=None, gamma=1.0), FedLDA()], ids=lambda m: m.name)
def test_ever_less_noise_ends_at_the_clipped_statistics(method):
    tasks = random_tasks(seed=3, first=40)

    def W(multiplier: float) -> torch.Tensor:
        context = noisy_context(method, multiplier=multiplier, inputs=8)
        step = NoisyStatistics(simulated(0), context.release)
        half = type(method.client(context))
        original, count = half.update, iter(range(10**6))

        def noisy(self, client_data, broadcast, state):
            upload, state = original(self, client_data, broadcast, state)
            return step.send(dataclasses.replace(upload, task=client_data.task), next(count)), state

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(half, "update", noisy)
            return learn(method, context, tasks)[1][-1]

    clipped = W(0.0)
    apart = [float((W(multiplier) - clipped).abs().max() / clipped.abs().max()) for multiplier in (1e-3, 1e-6, 1e-9)]
    assert apart[0] > 1e-4
    assert apart[2] < 1e-6
    assert apart[2] < apart[1] < apart[0]


START = {"body.w": torch.arange(6.0).reshape(2, 3), "heads.0.b": torch.tensor([1.0, -1.0])}


def update_through(step: NoisyUpdates, change: dict[str, torch.Tensor], client: int = 0) -> dict[str, torch.Tensor]:
    """What is left of a change of the model."""
    step.receive(Message({**START, "rate": torch.tensor(0.1)}, "model"), client)
    sent = step.send(Message({name: START[name] + change[name] for name in change}, "model", samples=3), client)
    assert sent.samples == 3
    return {name: sent[name] - START[name] for name in sent}


def length(change: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in change.values()))


def test_an_update_is_clipped_over_all_its_tensors_together():
    step = NoisyUpdates(simulated(0), clip=0.5, deviation=0.0)
    large = {"body.w": torch.full((2, 3), 3.0), "heads.0.b": torch.tensor([4.0, 0.0])}
    left = update_through(step, large)
    assert length(left) == pytest.approx(0.5, rel=1e-6)
    for name in large:
        assert torch.allclose(left[name], large[name] * 0.5 / length(large), atol=1e-6)
    small = {name: part * 1e-2 for name, part in large.items()}
    left = update_through(step, small)
    assert all(torch.allclose(left[name], small[name], atol=1e-6) for name in small)
    assert length(update_through(step, {name: 0 * part for name, part in large.items()})) == 0
    step.receive(Message(START), 0)
    with pytest.raises(ValueError, match="secret"):
        step.send(Message({"secret": torch.zeros(2)}), 0)


def test_updates_have_noise_of_their_own():
    step = NoisyUpdates(simulated(0), clip=1e-9, deviation=2.0)
    drawn = [update_through(step, {name: 0 * part for name, part in START.items()}, client) for client in range(2000)]
    values = torch.stack([torch.cat([part.flatten() for part in one.values()]) for one in drawn]).numpy()
    assert values.std() == pytest.approx(2.0, rel=0.02)
    assert np.abs(np.corrcoef(values.T) - np.eye(8)).max() < 0.15


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_the_noise_of_a_site_is_another_one_under_another_broadcast(key):
    """Where it was the same, the difference of the two uploads of a round that was done again had no noise."""
    knobs = Gaussian(multiplier=3.0, unit="client")
    [step] = knobs.middleware(FedAvg(training=Training(rounds=3)), context_of(4), 2, key)
    others = {**START, "body.w": START["body.w"] + 1}
    found = []
    for start in (START, others, START):
        step.receive(Message(start, "model"), 0)
        found.append(step.send(Message(start, "model"), 0)["heads.0.b"])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0], found[1]) is (key is None)


def test_a_client_s_whole_update_may_be_replaced():
    """Two updates are two clips apart at most, and the multiplier is in units of that."""
    step = NoisyUpdates(simulated(0), clip=0.5, deviation=0.0)
    large = {"body.w": torch.full((2, 3), 3.0), "heads.0.b": torch.tensor([4.0, 0.0])}
    one, other = update_through(step, large), update_through(step, {name: -part for name, part in large.items()})
    assert length({name: one[name] - other[name] for name in one}) == pytest.approx(1.0, rel=1e-6)
    trained, context = FedAvg(training=Training(rounds=3)), context_of(4)
    shares = {None: 1.0, 4: 0.5}
    for share_of, share in shares.items():
        knobs = Gaussian(multiplier=3.0, clip=0.5, unit="client", share_of=share_of)
        noisy = knobs.middleware(trained, context, 2)[0]
        drawn = [update_through(noisy, {name: 0 * part for name, part in START.items()}, k) for k in range(500)]
        spread = torch.cat([part.flatten() for one in drawn for part in one.values()]).std()
        assert float(spread) == pytest.approx(3.0 * 1.0 * share, rel=0.05)
