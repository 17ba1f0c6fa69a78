"""Gradient steps and samples through networks, by hand: what run.json's `compute` counts."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import NamedTuple

import pytest

from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.methods.autoencoders.fedcbc import FedCBC, VAETraining
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.fedewc import FedEWC
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.data_free.mfcl import MFCL, Generation
from fcl_bench.methods.distillation.fedlwf import FedLwF
from fcl_bench.methods.transformers.l2p import L2P
from fcl_bench.training.knobs import Gaussian, Training
from tests.methods.plain_training import made_tasks
from tests.methods.training_harness import feature_tasks, tiny_context
from tests.methods.whole_runs import feature_context, learnt
from tests.small_runs import interrupted_in, run_in

#: In batches of 4, an image that is left over joins the batch before: 4 + 5, 4 + 3, 4 + 4; then 4 + 4, 4 + 2, 3.
SIZES = [[9, 7, 8], [8, 6, 3]]
STEPS = [2 + 2 + 2, 2 + 2 + 1]
SAMPLES = [sum(sizes) for sizes in SIZES]
ROUNDS, EPOCHS = 2, 3
KNOBS = Training(rounds=ROUNDS, epochs=EPOCHS, batch_size=4, lr=0.05, augment="none")


class Counts(NamedTuple):
    gradient_steps: int = 0
    samples_trained: int = 0
    samples_forward: int = 0


PLAIN = Counts(ROUNDS * EPOCHS * sum(STEPS), ROUNDS * EPOCHS * sum(SAMPLES), 0)
#: A teacher sees each batch of the second task.
TAUGHT = PLAIN._replace(samples_forward=ROUNDS * EPOCHS * SAMPLES[1])
NOBODY = Counts()
TASKS = feature_tasks(0, [3, 3], SIZES)


def on_images(method, **options) -> Federation:
    return learnt(method, tiny_context(**options), made_tasks(SIZES, classes=3))


def on_features(method, parallel: str = "1") -> Federation:
    transport = lambda *parts: InProcess.of(*parts, parallel=parallel)  # noqa: E731
    return learnt(method, feature_context(), TASKS, transport=transport)


def counted(run: Federation) -> tuple[Counts, Counts]:
    return Counts(**run.state.client_counts), Counts(**run.state.server_counts)


@pytest.mark.slow_cases("on_images-adam")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("learn", [on_images, on_features])
def test_every_batch_of_every_epoch_is_a_step(learn, optimizer):
    assert counted(learn(FedAvg(training=dataclasses.replace(KNOBS, optimizer=optimizer), **kind(learn)))) == (
        PLAIN,
        NOBODY,
    )


def kind(learn) -> dict:
    return {"trains": "features", "frozen_stages": 0} if learn is on_features else {}


@pytest.mark.parametrize("parallel", ["1", "2", "3"])
@pytest.mark.parametrize("batch_size", [4, 64])
def test_clients_side_by_side_count_as_that_many(parallel, batch_size):
    """In batches of 64 each client has one, whose steps are taken all at once."""
    knobs = dataclasses.replace(KNOBS, batch_size=batch_size, momentum=0.0)
    run = on_features(FedAvg(training=knobs, trains="features"), parallel)
    assert (run.state.batched_turns["turns_batched"] > 0) == (parallel != "1")
    steps = PLAIN.gradient_steps if batch_size == 4 else ROUNDS * EPOCHS * 6
    assert counted(run) == (PLAIN._replace(gradient_steps=steps), NOBODY)


@pytest.mark.slow_cases("on_images")
@pytest.mark.parametrize("learn", [on_images, on_features])
def test_a_teacher_passes_forward_alone(learn):
    assert counted(learn(FedLwF(training=KNOBS, **kind(learn)))) == (TAUGHT, NOBODY)


@pytest.mark.slow_cases("on_images")
@pytest.mark.parametrize("learn", [on_images, on_features])
def test_fisher_information_differentiates_each_sample_once(learn):
    clients, server = counted(learn(FedEWC(training=KNOBS, **kind(learn))))
    assert clients == PLAIN._replace(samples_trained=PLAIN.samples_trained + sum(SAMPLES))
    assert server == NOBODY


@pytest.mark.slow
def test_moments_pass_forward_and_the_server_retrains_on_what_it_draws():
    run = on_images(FedAvg(training=KNOBS, ccvr="gaussian", gaussian=Gaussian(samples=16, batch_size=8, epochs=3)))
    clients, server = counted(run)
    assert clients == PLAIN._replace(samples_forward=sum(SAMPLES))
    drawn = sum(3 * 16 * len(known) for known in known_classes(run))
    assert server == Counts(drawn // 8, drawn, 0)


def known_classes(run: Federation) -> list[list[int]]:
    """After each task, the classes of which a client had two samples: here all of them."""
    assert sorted(run.server.replay.counts) == list(range(6))
    return [[*range(3)], [*range(6)]]


def test_a_generator_learns_at_the_server_and_its_images_count_where_they_pass():
    made, steps, batch = 5, 2, 16
    generator = Generation(noise=5, width=4, steps=steps, batch_size=batch, w_smooth=0.0)
    clients, server = counted(on_images(MFCL(training=KNOBS, synthetic=made, generator=generator)))
    more = ROUNDS * EPOCHS * STEPS[1] * made
    assert clients == PLAIN._replace(
        samples_trained=PLAIN.samples_trained + more, samples_forward=TAUGHT.samples_forward + more
    )
    # After each task but the last.
    assert server == Counts(steps, steps * batch, 0)


def test_each_class_has_an_autoencoder_that_steps_by_itself():
    """The server fuses what several clients have of a class: it draws of each, and asks all of all samples."""
    knobs, drawn = VAETraining(rounds=1, epochs=EPOCHS, batch_size=4), 10
    run = on_features(FedCBC(training=knobs, hidden=4, latent=3, samples=drawn))
    held = [[labels.unique(return_counts=True)[1] for _, labels in clients] for clients in TASKS]
    counts = [int(count) for clients in held for own in clients for count in own]
    everyone = [column for clients in TASKS for _, labels in clients for column in labels.unique().tolist()]
    fused = [teachers for teachers in Counter(everyone).values() if teachers > 1]
    clients, server = counted(run)
    assert clients == Counts(EPOCHS * sum(-(-count // 4) for count in counts), EPOCHS * sum(counts), 0)
    assert server.gradient_steps == EPOCHS * sum(-(-teachers * drawn // 4) for teachers in fused)
    assert server.samples_trained == EPOCHS * drawn * sum(fused)


@pytest.mark.slow
def test_queries_of_prompts_count_once_a_round():
    method = L2P(training=dataclasses.replace(KNOBS, optimizer="adam", lr=1e-3), layers=(0,), pool=2, top=1, length=2)
    clients, server = counted(on_images(method, architecture="vit"))
    assert clients == PLAIN._replace(samples_forward=ROUNDS * sum(SAMPLES))
    assert server == NOBODY


def test_a_closed_form_takes_no_step():
    assert counted(on_features(AFL())) == (NOBODY, NOBODY)


# In run.json ----------------------------------------------------------------------------------------------------------

DIGITS = ("data=digits", "backbone=tiny", "backbone.width=4", "tasks=2", "clients=3", "partition.min_size=0")


def test_features_count_once_for_each_sample_cached_or_not(tmp_path):
    for folder, cached in (("first", False), ("second", True)):
        record = run_in(tmp_path / folder, "method=afl", f"cache.dir={tmp_path}", *DIGITS).record
        assert record["runtime"]["feature_cache_hit"] == cached
        extracted = {"client_samples_extracted": sum(record["class_samples"])}
        assert {name: value for name, value in record["compute"].items() if value} == extracted


@pytest.mark.slow
def test_a_run_that_was_interrupted_counts_what_a_whole_one_does(tmp_path, monkeypatch):
    knobs = ("method=fedlwf", *(f"method.training.{knob}" for knob in ("rounds=1", "epochs=1", "augment=none")))
    whole = run_in(tmp_path / "whole", *knobs, *DIGITS)
    with interrupted_in(1, monkeypatch):
        run_in(tmp_path / "killed", *knobs, *DIGITS)
    resumed = run_in(tmp_path / "killed", *knobs, *DIGITS)
    assert json.loads((resumed.folder / "run.json").read_text())["compute"] == whole.record["compute"]
    assert whole.record["compute"]["client_samples_trained"] == sum(whole.record["class_samples"])
    assert whole.record["compute"]["client_samples_forward"] > 0
