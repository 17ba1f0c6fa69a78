"""LANDER's messages: exact bytes, what `variant` changes, and STSA's Table 5 from real messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.composition import composed
from fcl_bench.config import load_settings
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, image_split
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.data_free.generators.anchored import Synthesis, random_anchors
from fcl_bench.methods.data_free.lander import LANDER
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.papers.nominal import MIB
from fcl_bench.protocol.context import Context, Task, WireFormat
from tests.methods.classical_harness import SIZES, federation, training
from tests.methods.harness import turn
from tests.methods.lander_harness import lander
from tests.methods.training_harness import image_shard
from tests.methods.whole_runs import model_of

#: An image of 8 pixels, and the mapping of 32 features to anchors of 6 numbers.
IMAGE, MAPPING = 3 * 8 * 8, 4 * 6 * (32 + 1)


@pytest.mark.slow_cases("{'final': 'last'}-20", "{'ltc': 0.0}-20", "{'variant': 'published'}-36", "{}-20")
@pytest.mark.parametrize(
    ("knobs", "images"),
    [
        ({}, 20),
        ({"ltc": 0.0}, 20),
        ({"final": "last"}, 20),
        ({"variant": "published"}, 36),
    ],
    ids=str,
)
def test_bytes_by_formula(knobs, images):
    """Each round the model with its mapping both ways, and up a loss; once per client and task what was made."""
    weighting = {"weighting": "uniform"} if "variant" in knobs else {}
    ours, plain = federation(lander(weighting, **knobs)), federation(FedAvg(training(), loss_classes="task"))
    body = sum(value.nbytes for name, value in model_of(plain).items() if name.startswith("body."))
    old, new = {1: 3, 2: 5}, [3, 2, 2]
    loss = 0 if knobs.get("final") == "last" else 4
    had: dict[int, set[int]] = {}
    for row, theirs in zip(ours.state.ledger.uploads, plain.state.ledger.uploads, strict=True):
        assert row.up_bytes - theirs.up_bytes == (MAPPING + loss if theirs.up_bytes else 0)
        once = 0
        if row.round == 0 and SIZES[row.task][row.client]:
            if row.task:
                teacher = body + MAPPING + 4 * old[row.task] * (32 + 1)
                once += teacher + images * IMAGE
            if knobs.get("ltc", 1):
                # Those of tasks that the client missed come late.
                missing = set(range(row.task + 1)) - had.setdefault(row.client, set())
                once += sum(4 * 6 * new[task] for task in missing)
                had[row.client] |= missing
        assert row.down_bytes - theirs.down_bytes == (MAPPING + once if theirs.down_bytes else 0), (
            row.task,
            row.client,
        )


@pytest.mark.slow
def test_labels_of_images_stay_with_the_server():
    server = federation(lander()).server
    names = server.extra_broadcast().keys()
    assert "made.1.images" in names
    assert "made.1.labels" not in names
    assert server.privacy() == {"synthetic_images": 2 * 20}
    assert server.pictures()["synthetic"].tasks.tolist() == [0] * 16 + [1] * 16


# STSA's Table 5 -------------------------------------------------------------------------------------------------------


def resnet_context() -> Context:
    """ResNet-18 with the CIFAR stem and its own knobs, as `backbone=resnet18_cifar` has it."""
    split = image_split([0, 1], ArrayImages(np.zeros((2, 32, 32, 3), dtype=np.uint8)))
    network = load_settings(composed(["backbone=resnet18_cifar"])).backbone.trainable(Dataset("made", split, split), 0)
    return Context(network.dimension, 0, torch.float64, torch.device("cpu"), WireFormat(torch.float32), network)


def floats(message) -> int:
    """Bytes of what is the model in a message."""
    return sum(value.nbytes for name, value in message.items() if name.startswith(("body.", "heads.", "mapping.")))


@pytest.mark.slow
def test_stsas_table_5_counts_what_landers_published_code_exchanges():
    """STSA prints 79047.9 MB for LANDER on CIFAR-100 with 10 tasks, "after the first stage", for one client.

    One round of the first and of the second task is exchanged and measured; a task more is a head more. In each of 9
    tasks 100 rounds take the model down and up, and once the images of 41 batches go down. Their sum is 79,047.8 MiB
    (79,047.82); with a byte for every image's label it is 79,047.91, which prints as in the table.
    """
    context = resnet_context()
    small = Synthesis(batch=2, warmup=0, batches=2, g_steps=1, kd_steps=0, noise=4)
    method = LANDER(training(rounds=1, batch_size=4, weighting="uniform"), synthesis=small, variant="published")
    server, client = method.server(context), method.client(context)
    each = []
    for t in range(2):
        task = Task(t, range(10 * t, 10 * t + 10), 10 * t + 10)
        server.start_task(task)
        down = server.broadcast(task, 0)
        assert down.stage == MODEL
        client_data = image_shard(0, t, torch.randint(0, 255, (4, 3, 32, 32)).to(torch.uint8), 10 * t + torch.arange(4))
        up = turn(client, client_data, down)
        each.append((floats(down), floats(up)))
    assert down["made.0.images"].nbytes == 4 * 3072
    head = each[1][0] - each[0][0]
    assert each == [(each[0][0], each[0][0]), (each[0][0] + head, each[0][0] + head)]
    # Weights, running statistics, mapping; a row of a head and its bias for each of ten classes.
    assert (each[0][0], head) == (4 * (11_168_832 + 9_600 + 262_656) + head, 4 * 10 * 513)

    published = LANDER(training(rounds=100, weighting="uniform"), variant="published")
    images = published.synthesis.stored
    later = range(1, 10)
    exchanged = sum(published.training.rounds * sum(way + (t - 1) * head for way in each[1]) for t in later)
    pictures = len(later) * images * down["made.0.images"].nbytes // 4
    assert f"{(exchanged + pictures) / MIB:.1f}" == "79047.8"
    assert f"{(exchanged + pictures + len(later) * images) / MIB:.2f}" == "79047.91"
    assert f"{(exchanged + pictures + len(later) * images) / MIB:.1f}" == "79047.9"
    counted = published.paper_bytes(context, [10] * 10)
    assert counted == {"stsa_mib": pytest.approx((exchanged + pictures + len(later) * images) / MIB, rel=1e-12)}
    # The number speaks for all 41 batches: the 10,000 images that clients use would be another.
    used = exchanged + len(later) * 10_000 * (3072 + 1)
    assert f"{used / MIB:.1f}" == "79034.8"


@pytest.mark.slow
def test_what_the_count_of_table_5_leaves_out():
    """Per task and client: the teacher (44 MiB or so), anchors; per round a loss, a step size and a few integers."""
    federation_ = federation(lander())
    broadcast = federation_.server.broadcast(Task(2, range(5, 7), 7), 0)
    model = {name for name in broadcast if name.startswith(("body.", "heads.", "mapping."))}
    beside = {name.partition(".")[0] for name in broadcast.keys() - model}
    assert beside == {"teacher", "made", "anchors", "round", "rate", "classes"}
    assert broadcast["anchors.1"].nbytes == random_anchors(range(2), 6, 0).nbytes
