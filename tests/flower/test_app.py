"""Methods as a Flower app, over a grid in this process: the bits of the engine's own runs, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")

from flwr.app import ArrayRecord, Error, Message
from flwr.client.mod import secagg_mod, secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, arrays_size_mod, fixedclipping_mod, message_size_mod

from fcl_bench.errors import UserError
from fcl_bench.flower import Body, ClientApp, ServerApp
from fcl_bench.flower.app import plan
from tests.flower.fake_grid import FakeGrid, run
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context
from tests.small_methods import NAMES, architecture, short_run

CLIENTS = 3
#: Samples of each client in each task; the third has none in the first.
SIZES = [[5, 9, 0], [7, 3, 6]]
CLASSES = [[0, 1], [2, 3, 4]]


def conv():
    return tiny_context().network.build()


def vit():
    return tiny_context(architecture="vit").network.build()


BODIES = {"conv": Body(conv, 8, stages=("stage1", "stage2", "stage3", "stage4")), "vit": Body(vit, 8)}


def positive(tasks):
    """Features as ReLU gives them, which FedFeCaM needs."""
    return [[(Z.abs(), labels) for Z, labels in clients] for clients in tasks]


FEATURES = positive(feature_tasks(0, [2, 3], SIZES))
IMAGES = image_tasks(np.random.default_rng(0), [2, 3], SIZES)


def all_of(tasks):
    return [torch.cat([own[part] for clients in tasks for own in clients]) for part in (0, 1)]


def apps(method, tasks, body=None, mods=None, keys=(), **knobs):
    """Both apps, and what has been learnt after each task."""
    learnt = []
    given = {"seed": 3, "threads": 1, "transport.deadline": 60, **dict(keys)}
    server = ServerApp(
        method,
        tasks=CLASSES,
        test=lambda context: all_of(tasks),
        network=body,
        after_task=lambda context, found: learnt.append(found),
        keys=given,
        **knobs,
    )
    client = ClientApp(lambda context, task: tasks[task][context.node_config["partition-id"]], network=body, mods=mods)
    return server, FakeGrid(client, CLIENTS), learnt


def in_one_process(learnt, tasks):
    """The engine's own run of the same method on the same data."""
    federation = learnt[-1].federation
    return federation_of(federation.server.method, federation.context, tasks)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_the_bits_of_the_engines_run(name):
    typed = [text for text in short_run(name)[1:] if not text.startswith("backbone")]
    trains = plan.settings_of([f"method={name}", *typed], {}).method.trains_network
    tasks, body = (IMAGES, BODIES[architecture(name)]) if trains else (FEATURES, None)
    server, grid, learnt = apps(name, tasks, body)
    run(server, grid, {"fcl-bench": " ".join(typed)})
    engine = in_one_process(learnt, tasks)
    engine.run(lambda federation: None)
    assert (engine.state.answers["correct"] == learnt[-1].federation.state.answers["correct"]).all()
    ours, theirs = learnt[-1].model, engine.server.model()
    assert ours.keys() == theirs.keys()
    assert not [name for name, own in theirs.items() if not torch.equal(own, ours[name])]


@pytest.mark.slow
def test_a_closed_form_method_gives_the_accuracies_and_the_classifier_of_the_engine():
    server, grid, learnt = apps("afl", FEATURES)
    run(server, grid)
    engine = in_one_process(learnt, FEATURES)
    engine.run(lambda federation: None)
    right, tests = engine.state.answers["correct"], engine.stream.test_sizes
    assert np.allclose(learnt[-1].matrix[np.tril_indices(2)], (100 * right / tests)[np.tril_indices(2)], atol=1e-9)
    assert torch.allclose(learnt[-1].model["W"], engine.server.model()["W"], atol=1e-9, rtol=0)
    assert [len(found.accuracy) for found in learnt] == [1, 2]
    assert learnt[-1].classes == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_features_of_images_are_those_of_the_apps_network():
    server, grid, learnt = apps("afl", IMAGES, BODIES["conv"], keys={"wire.dtype": "float64"})
    run(server, grid)
    network = BODIES["conv"].trainable(3).build().eval()
    with torch.inference_mode():
        own = [[(network(2 * (images / 255) - 1), labels) for images, labels in clients] for clients in IMAGES]
    on_features, others, found = apps("afl", own, keys={"wire.dtype": "float64"})
    run(on_features, others)
    assert torch.allclose(found[-1].model["W"], learnt[-1].model["W"], rtol=1e-3)


def test_labels_may_be_any_numbers_and_some_may_be_missing():
    names = torch.tensor([7, 30, 4, 11, 9])
    tasks = [[(Z, names[labels]) for Z, labels in clients] for clients in FEATURES]
    server = ServerApp(
        "afl",
        tasks=[[7, 30], [4, 11, 9]],
        test=lambda context: all_of(tasks),
        keys={"seed": 3},
        after_task=lambda *_: None,
    )
    seen = []

    def load(context, task):
        inputs, labels = tasks[task][context.node_config["partition-id"]]
        seen.append(task)
        return inputs.numpy(), np.where(np.arange(len(labels)) == 0, -1, labels.numpy())

    found = []
    server = ServerApp(
        "afl",
        tasks=[[7, 30], [4, 11, 9]],
        test=lambda context: all_of(tasks),
        after_task=lambda _, own: found.append(own),
    )
    run(server, FakeGrid(ClientApp(load), CLIENTS))
    assert found[-1].classes == names.tolist()
    assert found[-1].federation.transport.samples(0)[1].tolist() == [4, 8, 0]


@pytest.mark.parametrize(
    ("share", "line"),
    [
        (
            None,
            "client 1 was lost in task 1, round 0: Flower's error 3: gone (the log of the node says more; transport.",
        ),
        (0.5, None),
        (0.9, "; 2 of 3 clients are left, and transport.minimum=0.9"),
    ],
)
def test_a_lost_reply_costs_its_turn_or_the_run(share, line):
    server, grid, learnt = apps("afl", FEATURES, keys={"transport.minimum": share})

    def answering(client, message, answer):
        train = message.metadata.message_type == "train"
        lost = train and client == 1 and message.content.config_records["config"]["task"] == 1
        return Message(Error(3, "gone"), reply_to=message) if lost else answer()

    grid.answering = answering
    if line is not None:
        with pytest.raises(UserError) as error:
            run(server, grid)
        assert line in str(error.value)
        return
    run(server, grid)
    assert learnt[-1].federation.state.absences["lost"] == 1
    whole, others, found = apps(
        "afl", [FEATURES[0], [FEATURES[1][0], (FEATURES[1][1][0][:0], FEATURES[1][1][1][:0]), FEATURES[1][2]]]
    )
    run(whole, others)
    assert torch.allclose(found[-1].model["W"], learnt[-1].model["W"], atol=1e-9, rtol=0)


def test_a_silent_node_is_waited_for_until_the_deadline():
    server, grid, learnt = apps("afl", FEATURES, keys={"transport.minimum": 0.5, "transport.deadline": 0.5})
    silent = lambda client, message: client == 1 and message.metadata.message_type == "train"  # noqa: E731
    grid.answering = lambda client, message, answer: None if silent(client, message) else answer()
    run(server, grid)
    assert learnt[-1].federation.state.absences["lost"] == 2


@pytest.mark.slow
def test_a_client_whose_upload_was_refused_has_its_state_of_before():
    server, grid, _ = apps(
        "scaffold", IMAGES, BODIES["conv"], keys={"on_bad_upload": "drop"}, training={"rounds": 3, "epochs": 1}
    )
    begun = []

    def answering(client, message, answer):
        found = answer()
        if client == 1 and message.metadata.message_type == "train":
            config = message.content.config_records["config"]
            begun.append(config["begin"])
            if (config["task"], config["round"]) == (0, 1):
                arrays = found.content.array_records["arrays"]
                name = next(iter(arrays))
                found.content["arrays"] = ArrayRecord({key: own for key, own in arrays.items() if key != name})
        return found

    grid.answering = answering
    run(server, grid)
    assert begun[:3] == ["none", "0.0", "0.0"]
    assert begun[3] == "0.2"


def test_a_node_without_its_clients_state_is_refused_in_one_line():
    server, grid, _ = apps("scaffold", IMAGES, BODIES["conv"], training={"rounds": 2, "epochs": 1})

    def answering(client, message, answer):
        if message.metadata.message_type == "train" and message.content.config_records["config"]["round"] == 1:
            for context in grid.nodes.values():
                context.state.clear()
        return answer()

    grid.answering = answering
    with pytest.raises(UserError, match=r"what the client retained after 0\.0 is gone"):
        run(server, grid)


@pytest.mark.slow
def test_local_differential_privacy_of_flower_is_composed_with_averaging():
    """It clips a client's model to a ball around the broadcast one; what is left of the noise is tiny."""
    mod = LocalDpMod(clipping_norm=1e-3, sensitivity=1e-12, epsilon=1.0, delta=0.1)
    server, grid, _ = apps(
        "fedavg", IMAGES, BODIES["conv"], [mod], {"wire.dtype": "float64"}, training={"rounds": 1, "epochs": 1}
    )
    moved = []

    def answering(client, message, answer):
        found = answer()
        if message.metadata.message_type == "train":
            assert found.has_content(), found.error
            sent, got = (own.content.array_records["arrays"] for own in (message, found))
            moved.append(sum(float(((sent[name].numpy() - got[name].numpy()) ** 2).sum()) for name in got) ** 0.5)
        return found

    grid.answering = answering
    run(server, grid)
    assert len(moved) == 5
    assert max(moved) <= 1.001e-3
    assert max(moved) > 0.9e-3


def test_local_differential_privacy_of_flower_is_refused_for_what_is_no_model():
    server, grid, _ = apps("afl", FEATURES, mods=[LocalDpMod(1.0, 1.0, 1.0, 0.1)])
    with pytest.raises(UserError, match="LocalDpMod clips models, and method=afl sends something else"):
        run(server, grid)


def test_mods_that_only_look_change_nothing():
    found = []
    for mods in ([], [message_size_mod, arrays_size_mod]):
        server, grid, learnt = apps("afl", FEATURES, mods=mods)
        run(server, grid)
        found.append(learnt[-1].model["W"])
    assert torch.equal(*found)


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod, secagg_mod, secaggplus_mod])
def test_mods_that_need_flowers_own_server_are_refused_with_what_would_work(mod):
    with pytest.raises(UserError, match=rf"{mod.__name__} needs a (strategy|workflow) of Flower's .*secure=sums"):
        ClientApp(lambda context, task: None, mods=[mod])


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("noise=gaussian", "noise=gaussian: a Flower app does not read noise"),
        ("data=digits", "data=digits: a Flower app does not read data"),
        ("wire.dtype=bfloat16", "NumPy's, which has no bfloat16"),
        ("method=nothing", "method=nothing is not known"),
        ("method.gamm=1", "unknown key method.gamm"),
        ("method=fedavg", "method=fedavg trains a network, and the app has none"),
        ("method=fedran method.bounds=true method.M=32 method.rank=4", "the audits bounds need the clients' data"),
        ("transport.minimum=0", "transport.minimum=0"),
    ],
)
def test_what_an_app_cannot_do_is_said_in_one_line(typed, line):
    server, grid, _ = apps("afl", FEATURES)
    with pytest.raises(UserError, match=line) as error:
        run(server, grid, {"fcl-bench": typed})
    assert "\n" not in str(error.value)


def test_nodes_that_do_not_fit_are_named():
    server, grid, _ = apps("afl", FEATURES)
    grid.nodes[1000].node_config["partition-id"] = 1
    with pytest.raises(UserError, match="another node has partition-id=1, too"):
        run(server, grid)
    server, grid, _ = apps("afl", FEATURES)
    del grid.nodes[1000].node_config["partition-id"]
    with pytest.raises(UserError, match=r"partition-id=None and num-partitions=3 .*flower-supernode --node-config"):
        run(server, grid)
    server, grid, _ = apps("afl", FEATURES, keys={"transport.deadline": 0.3})
    del grid.nodes[999]
    with pytest.raises(UserError, match=r"client 1 has no node after 0\.3 seconds \(1 of 3 clients have none\)"):
        run(server, grid)


def test_images_without_a_network_for_them_are_refused():
    server, grid, _ = apps("afl", IMAGES)
    with pytest.raises(UserError, match="the loaders give images, and the app has no network"):
        run(server, grid)


def test_a_network_with_other_weights_is_refused():
    server, grid, _ = apps("fedavg", IMAGES, BODIES["conv"])
    other = dataclasses.replace(BODIES["conv"], build=lambda: conv().apply(zeros))
    grid.app = ClientApp(lambda context, task: IMAGES[task][context.node_config["partition-id"]], network=other)
    with pytest.raises(UserError, match="its network begins with other weights than the server's"):
        run(server, grid)


def zeros(module):
    for own in module.parameters(recurse=False):
        own.data.zero_()


def test_a_label_of_another_task_is_named():
    server, grid, _ = apps("afl", FEATURES[::-1])
    with pytest.raises(UserError, match=r"client 0, task 0: the loader gives the label 2 \(\[0, 1\], or -1 for none\)"):
        run(server, grid)


def test_both_apps_can_be_sent_to_the_processes_of_a_simulation():
    cloudpickle = pytest.importorskip("cloudpickle")  # Ray's own is the same
    server, grid, _ = apps("afl", FEATURES)
    grid.app = cloudpickle.loads(cloudpickle.dumps(grid.app))
    run(server, grid)
