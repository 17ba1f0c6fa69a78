"""LANDER: resumed runs, classes that come back, anchors of a file, knobs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.files import json_hash
from fcl_bench.methods.data_free.generators.anchored import random_anchors
from fcl_bench.methods.data_free.lander import LANDER
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.typed import typed_instance
from tests.methods.classical_harness import federation, pictures
from tests.methods.lander_harness import fed, lander
from tests.methods.training_harness import (
    learn_images,
    tiny_context,
)
from tests.methods.whole_runs import model_of, same
from tests.small_runs import settings_for

# Runs -----------------------------------------------------------------------------------------------------------------


def test_a_run_that_stops_before_its_best_round_is_over_knows_the_best(tmp_path):
    """The state between rounds holds the best model so far."""
    server = lander({"rounds": 3}).server(tiny_context())
    task = Task(0, range(2), 2)
    server.start_task(task)
    came, _ = fed(server, task, [[1.0], [2.0]], [4])
    state = {name: value.clone() for name, value in server.state_dict().items()}
    assert same({name: state[f"best.{json.dumps(name)}"] for name in came[0]}, came[0])
    again = lander({"rounds": 3}).server(tiny_context())
    again.load_state_dict(state)
    again.start_task(task)
    again.broadcast(task, 2)
    again.absorb(0, Message({**again.sent, "loss": torch.tensor([3.0])}, samples=4))
    again.finish_round()
    assert same(again.network.state(), came[0])
    assert again.ended_with == [0]


def test_anchors_are_by_column_in_whatever_order_a_checkpoint_has_them():
    """By name, the tenth task's come before the second's."""
    method = lander(pre=0.0)
    server = method.server(tiny_context())
    for index in range(12):
        server.start_task(Task(index, range(index, index + 1), index + 1))
    expected = random_anchors(range(12), 6, derived_seed(0, "anchors") % 2**62)
    assert torch.equal(server.all_anchors(), expected)
    again = method.server(tiny_context())
    again.load_state_dict(dict(sorted(server.state_dict().items())))
    assert torch.equal(again.all_anchors(), expected)


@pytest.mark.slow
def test_classes_may_come_back_and_clients_come_late():
    """The third task has a class of the first again; client 2 comes with the second task."""
    tasks = pictures()
    tasks[2] = [(images, torch.where(labels == 5, 0, labels)) for images, labels in tasks[2]]
    tasks[2] = [(images, torch.where(labels == 6, 5, labels)) for images, labels in tasks[2]]
    ours = federation(lander(), tasks)
    assert [tuple(a.shape) for a in ours.server.anchors.values()] == [(3, 6), (2, 6), (1, 6)]
    assert ours.server.made["images"].shape == (20, 3, 8, 8)
    assert ours.server.made["labels"].max() == 4
    assert all(bool(torch.isfinite(value).all()) for value in model_of(ours).values())


def test_the_prediction_needs_no_mapping():
    server = learn_images(lander(), tiny_context(), pictures()[:1])
    assert not any(name.startswith("mapping") for name in server.model())
    assert any(name.startswith("mapping") for name in server.network.state())


def test_what_a_file_of_anchors_holds_is_part_of_the_runs_id_and_where_it_lies_is_not(tmp_path):
    def identity(path, seed) -> str:
        np.savez(path, anchors=np.random.default_rng(seed).standard_normal((10, 8)).astype(np.float32))
        return json_hash(settings_for(tmp_path, "method=lander", f"method.anchors={path}").identity())

    one = identity(tmp_path / "a.npz", seed=0)
    assert identity(tmp_path / "b.npz", seed=0) == one
    assert identity(tmp_path / "a.npz", seed=1) != one
    drawn = settings_for(tmp_path, "method=lander").identity()["method"]
    assert drawn["anchors"] == "random"  # as before


def test_anchors_of_a_file_are_by_the_data_sets_classes(tmp_path):
    path = tmp_path / "anchors.npz"
    rows = np.arange(60, dtype=np.float32).reshape(10, 6)
    np.savez(path, anchors=rows)
    method = lander(anchors=str(path))
    method.check(tiny_context(), [3, 2])
    server = method.server(tiny_context())
    server.start_task(Task(0, range(3), 3, classes=(7, 0, 9)))
    assert server.anchors["anchors.0"].tolist() == rows[[7, 0, 9]].tolist()
    server.method.pre = 0.0
    with pytest.raises(UserError, match=r"method\.anchors=.* has 10 anchors, none for class 12"):
        server.start_task(Task(1, range(3, 5), 5, classes=(3, 12)))
    with pytest.raises(UserError, match=r"method\.anchors=.* has 10 anchors \(one for each of 11 classes\)"):
        method.check(tiny_context(), [6, 5])
    with pytest.raises(UserError, match=r"method\.anchor_size=512: .* 6 numbers \(method\.anchor_size=6\)"):
        lander(anchors=str(path), anchor_size=512).check(tiny_context(), [3])


# Knobs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs",
    [
        {"radius": -1},
        {"ltc": None},
        {"cur": 0},
        {"pre": -1},
        {"anchor_size": 0},
        {"anchors": " "},
        {"final": "first"},
        {"synthesis": {"batch": 1}},
        {"synthesis": {"g_steps": 0}},
    ],
    ids=str,
)
def test_wrong_knobs_name_the_key(knobs):
    with pytest.raises(UserError, match=rf"method\.{next(iter(knobs))}"):
        typed_instance(LANDER, knobs, "method")


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({}, r"method\.training\.weighting=samples contradicts method\.variant=published"),
        ({"final": "last"}, r"method\.final=last contradicts"),
    ],
)
def test_what_contradicts_the_published_variant_is_told(knobs, told):
    with pytest.raises(UserError, match=told):
        typed_instance(LANDER, {"variant": "published", **knobs}, "method")


def test_features_are_refused():
    with pytest.raises(UserError, match=r"method\.trains=features: method=lander makes images"):
        LANDER(trains="features").check(tiny_context(), [2])
