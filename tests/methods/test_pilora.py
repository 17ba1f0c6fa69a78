"""PILoRA against the equations in NumPy: its loss, its re-weighting, what is sent, and what stays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.config import typed_instance
from fcl_bench.engine.admission import admitted
from fcl_bench.engine.middleware import Chain
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.pilora import (
    MEANS,
    PRESENT,
    PILoRA,
    PILoRAObjective,
    low_rank_layers,
    overlap,
    prototype_weights,
)
from fcl_bench.protocol.message import Message
from fcl_bench.training.heads import Heads
from fcl_bench.training.knobs import Training
from fcl_bench.training.objective import Objective
from tests.methods.harness import turn
from tests.methods.training_harness import (
    federation_of,
    image_shard,
    image_tasks,
    images_stream,
    learn_images,
    tiny_problem,
)
from tests.methods.whole_runs import assert_resumes, learnt, model_of, same

#: Of the tiny transformer: d, and the rank of the updates.
D, R = 16, 2
SIZES = [[9, 6, 0], [8, 1, 7], [6, 6, 6]]
CLASSES = [3, 2, 2]
NO_TERMS = {"pull": 0.0, "sparsity": 0.0, "orthogonality": 0.0}


def training(**knobs) -> Training:
    usual = {"rounds": 2, "epochs": 1, "batch_size": 4, "optimizer": "adam", "lr": 0.01, "rates": {"heads": 0.05}}
    return Training(**{**usual, "augment": "none", "weight_decay": 1e-5, **knobs})


def pilora(**knobs) -> PILoRA:
    names = {field.name for field in dataclasses.fields(Training)}
    how = {name: knobs.pop(name) for name in list(knobs) if name in names}
    return PILoRA(training(**how), **{"rank": R, **knobs})


def problem(**options):
    return tiny_problem(width=D // 8, architecture="vit", **options)


def pictures(classes=CLASSES, sizes=SIZES):
    return image_tasks(np.random.default_rng(0), classes, sizes)


def copied(server) -> dict[str, torch.Tensor]:
    """Its state as it is now."""
    return {name: value.clone() for name, value in server.state_dict().items()}


def grown(method: PILoRA, sizes: list[int]):
    """The network in float64, with all factors drawn."""
    network = method.build_network(problem())
    method.grow(network, sizes, 5)
    generator = torch.Generator().manual_seed(1)
    for layer in low_rank_layers(network).values():
        for factor in layer.B.values():
            factor.data = 0.3 * torch.randn(factor.shape, generator=generator)
    return network.double().eval()


# The loss -------------------------------------------------------------------------------------------------------------


def by_hand(network, method: PILoRA, images: np.ndarray, labels: list[int], columns: list[int], rivals: list[int]):
    """The equations; `columns` are those of the logits, `rivals` the logits that compete."""
    with torch.no_grad():
        z = network.body(images).numpy()
    w = torch.cat(list(network.heads.parameters())).detach().numpy()
    own = [next(logit for logit in rivals if columns[logit] == label) for label in labels]
    loss = 0.0
    for row, logit in zip(z, own, strict=True):
        far = {i: np.sqrt(((row - w[i]) ** 2).sum() / len(row)) for i in rivals}
        loss += (far[logit] + np.log(sum(np.exp(-one) for one in far.values()))) / len(z)
        loss += method.pull * far[logit] / len(z)
    for layer in low_rank_layers(network).values():
        for part in layer.parts:
            A = [layer.A[f"{part}_{task}"].detach().numpy() for task in range(layer.tasks)]
            loss += method.sparsity * np.abs(A[-1]).sum()
            loss += method.orthogonality * sum(np.abs(before @ A[-1].T).sum() for before in A[:-1])
    return loss


@pytest.mark.parametrize(
    "knobs",
    [{}, {**NO_TERMS, "pull": 2.0}, {**NO_TERMS, "sparsity": 0.7}, {**NO_TERMS, "orthogonality": 0.9}, NO_TERMS],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "labels"),
    [
        (Heads(((0, 1, 2), (3, 4)), (3, 4)), [3, 4, 4, 3]),
        # Class 1 comes back, beside a new one.
        (Heads(((0, 1, 2), (3,)), (1, 3)), [3, 1, 1, 3]),
        (Heads(((0, 1, 2),), (0, 1, 2)), [2, 0, 1, 1]),
    ],
    ids=["second", "recurring", "first"],
)
@pytest.mark.parametrize("over", ["seen", "task"])
def test_the_loss_is_what_the_equations_say(knobs, heads, labels, over):
    method = pilora(loss_over=over, layers=[0, 2], **knobs)
    network = grown(method, heads.sizes)
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    objective = PILoRAObjective(heads, method, D, torch.device("cpu"))
    ours = float(objective.loss(network, images, torch.tensor(labels)).detach())
    rivals = [i for i, column in enumerate(heads.logits) if over == "seen" or column in heads.task]
    assert ours == pytest.approx(by_hand(network, method, images, labels, heads.logits, rivals), rel=1e-6)
    features = network.body(images).detach()
    for place, column in enumerate(heads.task):
        chosen = [i for i, label in enumerate(labels) if label == column]
        torch.testing.assert_close(objective.means()[:, place], features[chosen].mean(dim=0).float())


def test_without_its_terms_it_is_the_plain_loss_bit_for_bit():
    heads, labels = Heads(((0, 1), (2, 3)), (2, 3)), torch.tensor([2, 3, 3, 2])
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = []
    for knobs in (NO_TERMS, {}):
        method = pilora(**knobs)
        network = grown(method, heads.sizes)
        ours = PILoRAObjective(heads, method, D, torch.device("cpu")).loss(network, images, labels)
        found.append(torch.equal(ours, Objective(heads).loss(network, images, labels)))
    assert found == [True, False]


def test_orthogonal_updates_do_not_overlap():
    """A_0 = e_1, e_2 and A_1 = e_3, e_4: 0. With A_1 = e_1, -2 e_2: 1 + 2, in q and in v."""
    network = grown(pilora(), [2, 2])
    [layer] = low_rank_layers(network).values()
    basis = torch.eye(D, dtype=torch.float64)
    for part in ("q", "v"):
        layer.A[f"{part}_0"].data, layer.A[f"{part}_1"].data = basis[:2], basis[2:4]
    assert float(overlap([layer]).detach()) == 0
    for part in ("q", "v"):
        layer.A[f"{part}_1"].data = torch.tensor([[1.0], [-2.0]]) * basis[:2]
    assert float(overlap([layer]).detach()) == 6


# The server's weights -------------------------------------------------------------------------------------------------


def test_the_hand_values_of_the_weights():
    """The farther of two has r = 0, the nearer r = 1 after scaling: softmax(5, 0)."""
    weights = prototype_weights(torch.tensor([1.0, 3.0], dtype=torch.float64), 0.2)
    np.testing.assert_allclose(weights.numpy(), [0.993307, 0.006693], atol=5e-7)
    np.testing.assert_allclose(
        prototype_weights(torch.tensor([3.0, 1.0]), 0.2).numpy(), [0.006693, 0.993307], atol=1e-6
    )


@pytest.mark.parametrize("distances", [[2.0, 2.0, 2.0], [7.0], [0.0, 0.0], [1.0, 1.0 + 1e-9]], ids=str)
def test_what_is_equally_near_counts_alike(distances):
    """0 / 0 in the public code; and what differs by rounding alone is no difference."""
    weights = prototype_weights(torch.tensor(distances, dtype=torch.float64), 0.2)
    np.testing.assert_allclose(weights.numpy(), 1 / len(distances))


def test_a_prototype_that_is_the_mean_itself_is_the_nearest():
    """r is infinite there: the limit of ever smaller distances."""
    limit = prototype_weights(torch.tensor([1e-12, 1.0, 3.0], dtype=torch.float64), 0.2)
    exact = prototype_weights(torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64), 0.2)
    torch.testing.assert_close(exact, limit, atol=1e-9, rtol=0)
    np.testing.assert_allclose(exact.numpy(), np.exp([5, 0, 0]) / (np.exp(5) + 2))


def weights_by_hand(prototypes: np.ndarray, means: np.ndarray, temperature: float) -> np.ndarray:
    r = [1 / sum(np.linalg.norm(one - mean) for mean in means) for one in prototypes]
    scaled = [(one - min(r)) / (max(r) - min(r)) for one in r]
    powers = [np.exp(one / temperature) for one in scaled]
    return np.array(powers) / sum(powers)


@pytest.mark.parametrize(("knobs", "reweighted"), [({"temperature": 0.3}, True), ({"reweighting": "none"}, False)])
def test_the_server_averages_updates_by_samples_and_prototypes_by_their_distances(knobs, reweighted):
    tasks = pictures()
    method, all_seen = pilora(rounds=2, **knobs), []
    server = learn_images(
        method, problem(), tasks, seen=lambda k, broadcast, upload: all_seen.append((k, broadcast, upload))
    )
    uploads = [upload for _, _, upload in all_seen]
    # The last round of the last task: three clients.
    last, state = uploads[-3:], server.network.state()
    shares = np.array([upload.samples for upload in last]) / sum(upload.samples for upload in last)
    for name in ("A.q_2", "A.v_2", "B.q_2", "B.v_2"):
        name = f"body.blocks.0.attn.qkv.{name}"
        mean = sum(share * upload[name].double() for share, upload in zip(shares, last, strict=True))
        torch.testing.assert_close(state[name], mean.float())
    assert (MEANS in last[0]) is reweighted
    for row in range(2):
        theirs = np.array([upload["heads.2.weight"][row].double().numpy() for upload in last])
        weights = shares
        if reweighted:
            means = np.array([u[MEANS][:, row].double().numpy() for u in last if u[PRESENT][row]])
            assert len(means) > 1
            weights = weights_by_hand(theirs, means, 0.3)
            assert abs(weights - shares).max() > 0.1
        np.testing.assert_allclose(state["heads.2.weight"][row].numpy(), weights @ theirs, rtol=1e-5, atol=1e-7)


def test_a_client_without_a_class_has_a_prototype_and_no_mean():
    """Three clients, of which the second has no sample of class 1: the means of the two others count."""
    tasks = pictures([2], [[8, 8, 8]])
    images, labels = tasks[0][1]
    tasks[0][1] = (images[labels == 0], labels[labels == 0])
    uploads = []
    server = learn_images(pilora(rounds=1), problem(), tasks, seen=lambda *seen: uploads.append(seen[2]))
    assert [upload[PRESENT].tolist() for upload in uploads] == [[1, 1], [1, 0], [1, 1]]
    assert not uploads[1][MEANS][:, 1].any()
    theirs = np.array([upload["heads.0.weight"][1].double().numpy() for upload in uploads])
    means = np.array([uploads[client][MEANS][:, 1].double().numpy() for client in (0, 2)])
    weights = weights_by_hand(theirs, means, 0.2)
    ours = server.network.heads[0].weight[1].detach().numpy()
    np.testing.assert_allclose(ours, weights @ theirs, rtol=1e-5, atol=1e-7)


def test_the_means_are_those_of_the_features_that_training_saw():
    """Under weights that do not move: of the frozen body's features, whatever the number of passes."""
    tasks = pictures([3], [[12, 5]])
    still = pilora(lr=1e-30, rates={"heads": 1e-30}, rounds=1, epochs=3)
    uploads = []
    server = learn_images(still, problem(), tasks, seen=lambda *seen: uploads.append(seen[2]))
    for (images, labels), upload in zip(tasks[0], uploads, strict=True):
        features = server.embed(images)
        for column in range(3):
            own = features[labels == column]
            assert bool(upload[PRESENT][column]) == bool(len(own))
            if len(own):
                torch.testing.assert_close(upload[MEANS][:, column], own.mean(dim=0), atol=1e-5, rtol=1e-4)


# What is sent ---------------------------------------------------------------------------------------------------------


def sent_bytes(d: int, c: int, heads: int, rank: int, means: bool = True) -> tuple[int, int]:
    """Up and down, of a client that has the old parts: four factors, prototypes; means, flags, samples; controls."""
    part = 4 * (4 * rank * d + c * d)
    return part + (4 * c * d + c if means else 0) + 8, part + 8 + 8 + 4 * heads


def test_the_papers_sizes():
    """A task of 10 classes at d = 768: 111 KB up, 80 KB down."""
    up, down = sent_bytes(768, 10, 1, 4)
    assert (up - 18, down - 20) == (4 * 27_648, 4 * 19_968)
    assert (round(up / 1e3), round(down / 1e3)) == (111, 80)


@pytest.mark.parametrize("means", [True, False])
def test_bytes_are_those_of_the_formulas(means):
    federation = learnt(pilora(reweighting="distances" if means else "none"), problem(), pictures())
    had: set[tuple[int, int]] = set()
    for row in federation.state.ledger.uploads:
        if not row.up_bytes:
            continue
        up, down = sent_bytes(D, CLASSES[row.task], row.task + 1, R, means)
        missed = [task for task in range(row.task) if (row.client, task) not in had]
        had |= {(row.client, task) for task in range(row.task)}
        once = sum(4 * (4 * R * D + CLASSES[task] * D) for task in missed)
        assert (row.up_bytes, row.down_bytes) == (up, down + once)
    # The third client joins in the second task, and is sent the first one's parts then.
    assert (2, 0) in had


def test_nothing_of_the_network_itself_travels_and_old_parts_stay():
    tasks, states = pictures(), []
    server = learn_images(pilora(), problem(), tasks, after=lambda _, s: states.append(copied(s)))
    first = {name: value for name, value in states[0].items() if "_0" in name or name.startswith("heads.0")}
    assert len(first) == 5
    for later in states[1:]:
        assert all(torch.equal(later[name], value) for name, value in first.items())
    fresh = pilora().build_network(problem())
    moved = [
        name for name, value in fresh.state_dict().items() if not torch.equal(server.network.state_dict()[name], value)
    ]
    assert moved == []
    [layer] = low_rank_layers(server.network).values()
    assert all(bool(factor.any()) for factor in layer.B.values())


def test_a_new_task_starts_from_the_network_as_it_was():
    """B = 0: with the first head alone, the features are the frozen ViT's."""
    method, images = pilora(), torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    network = method.build_network(problem())
    method.grow(network, [2, 2], 5)
    plain = problem().network.build()
    torch.testing.assert_close(network.eval().body(images), plain.eval()(images), atol=1e-6, rtol=1e-5)


def test_the_broadcast_carries_each_half_the_same_initial_values():
    """Both halves draw A and the prototypes; the first broadcast holds what a client draws itself."""
    method, tasks = pilora(), pictures()
    server, client = method.server(problem()), method.client(problem())
    task = images_stream(tasks)[0]
    server.start_task(task)
    client.prepare(server.heads)
    assert same(server.network.state(), client.network.state())


def test_an_upload_that_contradicts_itself_is_refused():
    method, tasks = pilora(), pictures()
    server, client = method.server(problem()), method.client(problem())
    task = images_stream(tasks)[0]
    server.start_task(task)
    upload = turn(client, image_shard(0, 0, *tasks[0][0]), server.broadcast(task, 0))
    expected = server.expects(task, 0)
    assert admitted(0, upload, Chain([]), server, expected) is upload
    flags = {told: torch.tensor(told, dtype=torch.uint8) for told in [(0, 0, 0), (1, 1, 0), (1, 2, 0)]}
    wrong = {
        "it has no class": {PRESENT: flags[0, 0, 0], MEANS: torch.zeros(D, 3)},
        "it has the mean of a class and no sample of it": {PRESENT: flags[1, 1, 0], MEANS: torch.ones(D, 3)},
        "present holds 2": {PRESENT: flags[1, 2, 0]},
        "class_means is not finite": {MEANS: torch.full((D, 3), torch.nan)},
    }
    for told, fields in wrong.items():
        with pytest.raises(UserError, match=told):
            admitted(0, Message({**upload, **fields}, samples=upload.samples), Chain([]), server, expected)


# Predictions ----------------------------------------------------------------------------------------------------------


def test_it_names_the_class_of_the_nearest_prototype_and_so_does_the_saved_model():
    tasks = pictures()
    server = learn_images(pilora(rounds=3), problem(), tasks)
    images = torch.cat([images for clients in tasks for images, _ in clients])
    features, model = server.embed(images), server.model()
    prototypes = torch.cat([head.weight for head in server.network.heads]).detach()
    assert torch.equal(model["W"], prototypes.T)
    distances = (features[:, None] - prototypes).norm(dim=2) / D**0.5
    scores = server.predict(images)
    torch.testing.assert_close(scores, -distances, atol=1e-5, rtol=1e-4)
    assert torch.equal((features @ model["W"] + model["bias"]).argmax(dim=1), scores.argmax(dim=1))


@pytest.mark.parametrize("variant", ["working", "published"])
def test_which_updates_a_test_applies(variant):
    """All of them, or the first alone."""
    tasks = pictures()
    server = learn_images(pilora(variant=variant, lr=0.1), problem(), tasks)
    images = tasks[2][0][0]
    ours, [layer] = server.embed(images), low_rank_layers(server.network).values()
    found = {}
    for name, scales in {"working": {}, "published": {1: 0.0, 2: 0.0}}.items():
        layer.scales = scales
        found[name] = server.trainer.features(server.network, images)
    assert torch.equal(ours, found[variant])
    assert not torch.allclose(found["working"], found["published"], atol=1e-4)


def test_the_variant_leaves_training_as_it_is():
    models = [model_of(learnt(pilora(variant=variant), problem(), pictures())) for variant in ("working", "published")]
    assert same(*models)


def test_it_learns():
    """Three classes of images: from a third to nearly all."""
    tasks = image_tasks(np.random.default_rng(3), [3], [[40, 40]])
    federation = learnt(pilora(rounds=5, epochs=5, batch_size=16), problem(), tasks)
    right = federation.state.answers["correct"][-1][0] / 80
    assert right > 0.8


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{"fraction": 0.7}, {"variant": "published"}], ids=str)
def test_a_resumed_run_is_an_uninterrupted_one(knobs):
    def made():
        return federation_of(pilora(**knobs), problem(), pictures(), unlabelled=[(1, 0)])

    whole, saved = assert_resumes(made, step=2)
    told = whole.server.report()[MEANS]
    assert told > 0
    assert [int(tensors[MEANS]) for _, tensors in saved] == sorted(int(tensors[MEANS]) for _, tensors in saved)


def test_the_report_counts_the_means_that_left():
    tasks, present = pictures(), []
    server = learn_images(pilora(), problem(), tasks, seen=lambda *seen: present.append(int(seen[2][PRESENT].sum())))
    classes = sum(len(set(labels.tolist())) for clients in tasks for _, labels in clients)
    assert server.report()[MEANS] == sum(present) == 2 * classes
    assert learn_images(pilora(reweighting="none"), problem(), tasks).report()[MEANS] == 0


def test_classes_that_come_back_train_their_old_prototypes_and_no_others():
    tasks = pictures()
    images, labels = tasks[1][0]
    tasks[1][0] = (images, torch.where(labels == 3, 1, labels))  # class 1 of the first task
    states = []
    server = learn_images(pilora(), problem(), tasks, after=lambda _, s: states.append(copied(s)))
    before, after = (state["heads.0.weight"] for state in states[:2])
    moved = [row for row in range(3) if not torch.equal(before[row], after[row])]
    assert moved == [1]
    assert server.predict(images).shape[1] == 7


def test_seeds_differ_and_repeat():
    runs = [model_of(learnt(pilora(), problem(seed=seed), pictures())) for seed in (0, 0, 1)]
    assert same(runs[0], runs[1])
    assert not any(torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"rank": 0}, "method.rank"),
        ({"temperature": 0}, "method.temperature"),
        ({"pull": -1}, "method.pull"),
        ({"reweighting": "samples"}, "method.reweighting"),
        ({"layers": [9]}, "method.layers"),
        ({"layers": []}, "method.layers"),
        ({"targets": ["w"]}, "method.targets"),
        ({"targets": []}, "method.targets"),
        ({"on": "features"}, "method.on"),
    ],
    ids=str,
)
def test_wrong_knobs_name_the_key(knobs, told):
    with pytest.raises(UserError, match=told.replace(".", r"\.")):
        typed_instance(PILoRA, knobs, "method").check(problem(), CLASSES)


def test_a_network_that_is_no_transformer_is_refused():
    with pytest.raises(UserError, match="method=pilora works inside a vision transformer"):
        pilora().check(tiny_problem(), CLASSES)
