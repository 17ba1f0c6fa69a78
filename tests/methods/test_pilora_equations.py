"""PILoRA against the equations in NumPy: its loss, and how the server weighs prototypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.transformers.low_rank import low_rank_layers
from fcl_bench.methods.transformers.pilora import (
    MEANS,
    PRESENT,
    PILoRA,
    PILoRAObjective,
    overlap,
    prototype_weights,
)
from fcl_bench.training.network import Heads
from fcl_bench.training.objective import Objective
from tests.methods.pilora_harness import D, context, pictures, pilora
from tests.methods.training_harness import learn_images

NO_TERMS = {"pull": 0.0, "sparsity": 0.0, "orthogonality": 0.0}


def grown(method: PILoRA, sizes: list[int]):
    """The network in float64, with all factors drawn."""
    network = method.build_network(context())
    method.grow(network, sizes, 5)
    generator = torch.Generator().manual_seed(1)
    for layer in low_rank_layers(network.body).values():
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
    for layer in low_rank_layers(network.body).values():
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
    method = pilora(loss_classes=over, layers=[0, 2], **knobs)
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
    [layer] = low_rank_layers(network.body).values()
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
        method, context(), tasks, seen=lambda k, broadcast, upload: all_seen.append((k, broadcast, upload))
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
    server = learn_images(pilora(rounds=1), context(), tasks, seen=lambda *seen: uploads.append(seen[2]))
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
    server = learn_images(still, context(), tasks, seen=lambda *seen: uploads.append(seen[2]))
    for (images, labels), upload in zip(tasks[0], uploads, strict=True):
        features = server.embed(images)
        for column in range(3):
            own = features[labels == column]
            assert bool(upload[PRESENT][column]) == bool(len(own))
            if len(own):
                torch.testing.assert_close(upload[MEANS][:, column], own.mean(dim=0), atol=1e-5, rtol=1e-4)
