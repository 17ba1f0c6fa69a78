"""What the data-free methods share: when something is made, how it travels, what a resumed run goes on with."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from fcl_bench.errors import UserError
from fcl_bench.execution.pictures import images_figure
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.data_free.generative import DataFreeClient, DataFreeMethod, DataFreeServer
from fcl_bench.methods.data_free.generators.images import ImageGenerator, ImagePool, to_bytes
from fcl_bench.protocol.method import Picture
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads
from fcl_bench.training.objective import Objective
from tests.methods.training_harness import federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import model_of, same

SIZES = [[9, 6, 0], [8, 0, 7], [6, 6, 6]]
POOL = 20


def training(**knobs) -> Training:
    return Training(**{"rounds": 2, "epochs": 2, "batch_size": 4, "lr": 0.05, **knobs})


def tasks():
    return image_tasks(np.random.default_rng(0), [2, 2, 2], SIZES)


class Echoed(Objective):
    """Cross-entropy, and that of synthetic images over all classes, each as often as the others."""

    def __init__(self, heads, over, rest, pool):
        super().__init__(heads, over, rest)
        self._pool = pool

    def loss(self, network, inputs, labels):
        scores = network(self._pool.next(3))
        return super().loss(network, inputs, labels) - scores.log_softmax(dim=1).mean()


class EchoingClient(DataFreeClient):
    def objective(self, client_data, broadcast, state):
        made = self.made(client_data, broadcast)
        if not made:
            return super().objective(client_data, broadcast, state)
        seed = self.synthetic_seed(client_data, broadcast)
        pool = ImagePool(made["images"], seed, lambda images, _: images, self.scale)
        return Echoed(Heads.from_message(broadcast), self.method.loss_classes, False, pool)


class EchoingServer(DataFreeServer):
    """Makes images of noise, and says what it was given."""

    def synthesise(self, task):
        assert not self.network.training
        assert not any(value.requires_grad for value in self.network.parameters())
        assert len(self.network.heads) == task.index
        generator = ImageGenerator(8, self.start.size)
        with torch.no_grad():
            images = to_bytes(generator(generator.noise(POOL)))
        self.made = {"images": images, "labels": torch.arange(POOL) % task.new_columns.start}


@dataclass
class Echoing(DataFreeMethod):
    name: ClassVar[str] = "echoing"
    client_half = EchoingClient
    server_half = EchoingServer
    training: Training = field(default_factory=training)
    on_: bool = True

    @property
    def replays(self):
        return self.on_


def learnt(method, seen=None):
    federation = federation_of(method, tiny_context(), tasks())
    federation.run(seen or (lambda _: None))
    return federation


@pytest.mark.slow
def test_a_method_that_makes_nothing_is_fedavg_bit_for_bit():
    ours, plain = learnt(Echoing(on_=False)), learnt(FedAvg(training=training(), loss_classes="task"))
    assert same(model_of(ours), model_of(plain))
    assert ours.server.privacy() == {"synthetic_images": 0}
    assert ours.server.pictures() == {}


@pytest.mark.slow
def test_images_are_made_before_every_task_but_the_first():
    federation = learnt(Echoing())
    assert federation.server.privacy() == {"synthetic_images": 2 * POOL}
    shown = federation.server.pictures()["synthetic"]
    assert shown.images.shape == (2 * 16, 3, 8, 8)
    assert shown.images.dtype == torch.uint8
    assert shown.tasks.tolist() == [0] * 16 + [1] * 16
    assert shown.labels[16:].max() == 3


@pytest.mark.slow
def test_images_and_the_teacher_go_down_once_to_each_client_of_a_task():
    federation, plain = learnt(Echoing()), learnt(FedAvg(training=training(), loss_classes="task"))
    body = sum(value.nbytes for name, value in model_of(plain).items() if name.startswith("body."))
    for ours, theirs in zip(federation.state.ledger.uploads, plain.state.ledger.uploads, strict=True):
        teacher = body + ours.task * 2 * (tiny_context().network.dimension + 1) * 4
        pool = POOL * (3 * 8 * 8 + 8)
        first = ours.task and ours.round == 0 and ours.down_bytes
        assert ours.down_bytes - theirs.down_bytes == (teacher + pool if first else 0)
        assert ours.up_bytes == theirs.up_bytes


def test_features_are_refused():
    with pytest.raises(UserError, match=r"method.trains=features: method=echoing makes images"):
        Echoing(trains="features")


@pytest.mark.slow
def test_every_task_has_a_row_in_the_picture():
    images = torch.randint(0, 255, (20, 3, 8, 8), dtype=torch.uint8)
    figure = images_figure("made", Picture(images, torch.arange(20), torch.tensor([0] * 17 + [1] * 3)))
    drawn = [axes for axes in figure.axes if axes.images]
    assert len(drawn) == 16 + 3
    assert [axes.get_title() for axes in drawn[16:]] == ["17", "18", "19"]
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert imread(io.BytesIO(file.getvalue())).ndim == 3
