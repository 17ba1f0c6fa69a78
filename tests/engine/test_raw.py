"""What samples themselves would cost: what the two methods that send them do send."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import RawSamples
from fcl_bench.methods.averaging.centralised import Centralised
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.protocol.context import WIRE_DTYPES, WireFormat
from fcl_bench.training.knobs import Training
from tests.engine.counting import federation
from tests.methods.harness import context_of
from tests.methods.test_revealed import HELD, tasks_of
from tests.methods.training_harness import federation_of, tiny_context

FAST = Training(rounds=2, epochs=1, batch_size=8, lr=0.01, augment="none")


def exchanged(method, context, tasks, **options):
    made = federation_of(method, context, tasks, **options)
    made.run(lambda _: None)
    return made.state.ledger.communication()


@pytest.mark.parametrize("wire", WIRE_DTYPES)
def test_joint_sends_the_raw_features(wire):
    sent = exchanged(CentralisedRidge(M=4), context_of(6, wire=wire), tasks_of())
    raw = sent["raw"]
    assert raw["kind"] == "features"
    assert raw["total_bytes"] == sent["up_total_bytes"]
    assert raw["busiest_bytes"] == sent["up_max_bytes"]
    assert (raw["uploads"], raw["larger"]) == (7, 0)


def test_centralised_sends_the_raw_images():
    sent = exchanged(Centralised(training=FAST), tiny_context(), tasks_of(shape=(3, 8, 8)))
    samples = sum(n for clients in HELD for classes in clients for n in classes.values())
    assert sent["raw"]["total_bytes"] == sent["up_total_bytes"] == samples * (3 * 8 * 8 + 4)
    assert sent["raw"]["busiest_bytes"] == sent["up_max_bytes"]
    assert (sent["raw"]["kind"], sent["raw"]["sample_bytes"], sent["raw"]["larger"]) == ("images", 196, 0)


def test_an_upload_is_the_sum_over_rounds_and_samples_are_sent_once():
    one, two = (
        exchanged(
            FedAvg(training=Training(rounds=rounds, epochs=1, batch_size=8)),
            tiny_context(),
            tasks_of(shape=(3, 8, 8)),
        )
        for rounds in (1, 2)
    )
    assert two["up_max_bytes"] == 2 * one["up_max_bytes"]
    assert two["raw"] == one["raw"]
    assert one["raw"]["larger"] == one["raw"]["uploads"] == 7  # the model is larger than any client's images


def test_few_samples_are_smaller_than_their_statistics_and_many_are_not():
    """Class means of two classes: 2 (6 + 1) numbers, as much as two samples with their labels."""
    held = [[{0: 1}, {0: 1, 1: 1}, {0: 2, 1: 1}]]
    sent = exchanged(FedNCM(), context_of(6, wire="float32"), tasks_of(held))
    assert sent["up_max_bytes"] == 2 * 7 * 4
    assert (sent["raw"]["uploads"], sent["raw"]["larger"]) == (3, 1)
    assert sent["raw"]["busiest_bytes"] == 3 * 7 * 4  # of three uploads of one size, that of the most samples


def test_who_sends_nothing_is_not_compared():
    sent = exchanged(STSA(M=4), context_of(6), tasks_of(), unlabelled=[(0, 0)])
    assert sent["raw"]["uploads"] == 6
    without = sum(n for clients in HELD for classes in clients for n in classes.values()) - 6
    assert sent["raw"]["total_bytes"] == without * (6 * 8 + 4)


def test_nobody_sees_samples_that_stay_where_they_are():
    from tests.engine.test_transport import Delegating

    class Remote(Delegating):
        everything = raw = None

    made, _ = federation(transport=Remote)
    made.run(lambda _: None)
    assert made.state.ledger.communication()["raw"] is None


def test_the_cost_of_no_sample_is_nothing():
    half = RawSamples.of(torch.zeros(0, 5), WireFormat(torch.float16))
    assert half.cost(np.array([0, 1, 3])).tolist() == [0, 5 * 2 + 4 + 5 * 4, 3 * (5 * 2 + 4) + 5 * 4]
    images = RawSamples.of(torch.zeros(0, 3, 4, 4, dtype=torch.uint8), WireFormat(torch.float16))
    assert images.cost(np.array([0, 2])).tolist() == [0, 104]
