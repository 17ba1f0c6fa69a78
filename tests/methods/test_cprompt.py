"""Fed-CPrompt: the contrast by hand and against three separate models, its limits, and whole runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.transformers.coda_prompt import CodaPrompt
from fcl_bench.methods.transformers.cprompt import Contrast, CPrompt
from fcl_bench.methods.transformers.prompts import PromptObjective
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads
from fcl_bench.typed import typed_instance
from tests.methods.coda_oracle import (
    COUNT,
    LAYERS,
    LENGTH,
    TASKS,
    Oracle,
    adam,
    assert_uploads,
    exchanges,
    lively_context,
    plain_training,
    recurring,
)
from tests.methods.training_harness import image_shard
from tests.methods.whole_runs import learnt, model_of, same

KNOBS = {"layers": LAYERS, "components": COUNT, "length": LENGTH}


def cprompt(training: Training | None = None, **knobs) -> CPrompt:
    return CPrompt(training or plain_training(), **{**KNOBS, "orthogonality": 0.0, **knobs})


def distances(*values) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


# The hinge ------------------------------------------------------------------------------------------------------------


def test_the_hinge_by_hand():
    """Samples at squared distances .001 and .004 of phi_g, .15 and .1 of phi_o: 1 - 1.5 + 1 and 4 - 1 + 1."""
    near, far = [0.001, 0.004], [0.15, 0.1]
    assert cprompt().hinge(distances(near, far)).item() == pytest.approx((0.5 + 4) / 2)
    # The code's sum over the batch is 5 - 2.5, and one margin: the second sample outweighs the first.
    published = cprompt(variant="published")
    assert published.hinge(distances(near, far)).item() == pytest.approx(3.5)
    # Where one sample is far inside the margin, the mean does not let it pay for the other.
    assert cprompt().hinge(distances([0, 0.004], [1, 0.1])).item() == pytest.approx((0 + 4) / 2)
    assert published.hinge(distances([0, 0.004], [1, 0.1])).item() == 0
    assert cprompt(near=2, far=3, margin=0.5).hinge(distances([1.0], [0.4])).item() == pytest.approx(2 - 1.2 + 0.5)


def test_the_first_task_knows_no_margin():
    assert cprompt().hinge(distances([0.001, 0.004])).item() == pytest.approx(2.5)
    assert cprompt(variant="published").hinge(distances([0.001, 0.004])).item() == pytest.approx(5)


# Against three separate models ----------------------------------------------------------------------------------------


def feature_term(strength: float, near: float, far: float, margin: float, published: bool = False):
    def term(phi, theirs, earlier, values, sent):
        apart = near * (phi - theirs).square().sum(dim=1)
        if earlier is None:
            return strength * (apart.sum() if published else apart.mean())
        apart = apart - far * (phi - earlier).square().sum(dim=1)
        return strength * (torch.relu(apart.sum() + margin) if published else torch.relu(apart + margin).mean())

    return term


CASES = {
    "features": (
        {"near": 2000.0, "far": 60.0, "margin": 1.0, "strength": 0.7},
        feature_term(0.7, 2000.0, 60.0, 1.0),
        False,
    ),
    "published": (
        {"near": 500.0, "far": 20.0, "margin": 4.0, "variant": "published"},
        feature_term(1.0, 500.0, 20.0, 4.0, True),
        True,
    ),
}


@pytest.mark.slow_cases("features", "published")
@pytest.mark.parametrize("name", CASES)
def test_every_upload_is_that_of_the_oracle(name):
    knobs, term, softmax = CASES[name]
    training = plain_training()
    found = exchanges(cprompt(training, **knobs), lively_context(), TASKS)
    assert_uploads(Oracle(lively_context(), training, softmax=softmax, term=term), found, TASKS)
    # The term is worth seeing.
    without = exchanges(cprompt(training, **{**knobs, "strength": 0.0}), lively_context(), TASKS)
    for task in (0, 1):
        mine, theirs = ([up for t, _, _, up in run if t == task] for run in (found, without))
        assert max(float((mine[-1][n] - theirs[-1][n]).abs().max()) for n in mine[-1]) > 1e-3


def halves(method: CPrompt, task: int = 1):
    """A client at the first step of the task's first round: itself, its objective, inputs, labels, the last end."""
    found = exchanges(method, lively_context(), TASKS)
    down = next(down for t, _, down, _ in found if t == task)
    client, (images, labels) = method.client(lively_context()), TASKS[task][0]
    client_data = image_shard(0, task, images, labels)
    client.take_over(client_data, down)
    client.network.train()
    return client, client.objective(client_data, down, {}), images.float() / 127.5 - 1, labels, found


@pytest.mark.slow
def test_the_last_tasks_model_is_that_with_which_it_ended():
    """phi_o is made of the groups before the last; the server's own model at the end of the first task agrees."""
    method = cprompt()
    client, objective, inputs, *_ = halves(method)
    ended = learnt(method, lively_context(), TASKS[:1]).server
    expected = ended.network.eval().body(inputs).detach()
    own = client.network.body(inputs)
    theirs, earlier = objective._theirs(client.network, inputs)
    torch.testing.assert_close(earlier, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(theirs, own.detach(), atol=1e-6, rtol=1e-5)
    assert float((own - earlier).detach().abs().max()) > 1e-3
    assert not theirs.requires_grad
    assert not earlier.requires_grad


@pytest.mark.slow_cases("published", "working")
@pytest.mark.parametrize("variant", ["working", "published"])
def test_the_first_step_of_a_round_only_moves_away_from_the_last_task(variant):
    """phi = phi_g: the value is the hinge of 1 - 10 ||phi - phi_o||^2, and so is the gradient."""
    client, objective, inputs, *_ = halves(cprompt(variant=variant, margin=1e4))
    network = client.network
    weights = [value for name, value in network.named_parameters() if value.requires_grad and "prompts" in name]
    features = network.body(inputs)
    value = objective.contrast(network, inputs, features)
    found = torch.autograd.grad(value, weights, retain_graph=True)
    _, earlier = objective._theirs(network, inputs)
    apart = 10 * (features - earlier).square().sum(dim=1)
    alone = 1e4 - (apart.mean() if variant == "working" else apart.sum())
    assert value.item() == pytest.approx(alone.item(), rel=1e-5)
    for a, b in zip(found, torch.autograd.grad(alone, weights), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3 * float(b.abs().max()), rtol=0)
    # With the usual margin it is far enough away already, and there is no gradient at all.
    usual = halves(cprompt(variant=variant))[1]
    assert usual.contrast(network, inputs, features).item() == pytest.approx(
        max(0.0, 1 - apart.sum().item()) if variant == "published" else torch.relu(1 - apart).mean().item(),
        abs=1e-4,
    )


@pytest.mark.slow
def test_two_forward_passes_beside_the_clients_own_and_no_second_query():
    """The query once for all three models, and both earlier models' features in one pass of twice the images."""
    client, objective, inputs, labels, _ = halves(cprompt())
    sizes: list[int] = []
    client.network.body.vit.register_forward_hook(lambda _, images, __: sizes.append(len(images[0])))
    objective.loss(client.network, inputs, labels)
    assert sizes == [6, 6, 12]
    client.network.body.expect(torch.zeros(6, 16))
    sizes.clear()
    objective.loss(client.network, inputs, labels)
    assert sizes == [6, 12]


@pytest.mark.slow
def test_the_earlier_models_stay_where_the_round_began():
    client, objective, inputs, *_ = halves(cprompt(margin=100))
    network = client.network
    before = objective.contrast(network, inputs, network.body(inputs)).item()
    kept = [value.clone() for value in objective._theirs(network, inputs)]
    with torch.no_grad():
        for value in network.parameters():
            if value.requires_grad:
                value.add_(0.1)
    features = network.body(inputs)
    now = objective._theirs(network, inputs)
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    assert objective.contrast(network, inputs, features).item() != before


@pytest.mark.slow
def test_a_strong_contrast_keeps_features_where_they_were():
    """The change of features in a client's round shrinks with the weight."""
    moved = []
    for near in (0.0, 10.0, 100.0):
        method = cprompt(plain_training(rounds=1, epochs=4, lr=0.2, momentum=0.0), near=near)
        [(*_, down, up)] = exchanges(method, lively_context(), TASKS[:1])
        client, (images, labels) = method.client(lively_context()), TASKS[0][0]
        client.take_over(image_shard(0, 0, images, labels), down)
        network, inputs = client.network.eval(), images.float() / 127.5 - 1
        with torch.no_grad():
            sent = network.body(inputs)
            network.load(dict(up))
            moved.append(float((network.body(inputs) - sent).square().sum(dim=1).mean()))
    assert moved[0] > 1.3 * moved[1] > 1.3 * 2 * moved[2] > 0


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_its_weight_it_is_coda_prompt_bit_for_bit():
    runs = [
        learnt(method, lively_context(), TASKS)
        for method in (
            cprompt(adam(), orthogonality=0.1, strength=0),
            CodaPrompt(adam(), **KNOBS, orthogonality=0.1),
            cprompt(adam(), orthogonality=0.1, margin=30),
        )
    ]
    assert same(model_of(runs[0]), model_of(runs[1]))
    assert not same(model_of(runs[0]), model_of(runs[2]))
    # Neither model that it looks at costs a byte, nor does a client keep more for it.
    ledgers = [[(row.up_bytes, row.down_bytes) for row in run.state.ledger.uploads] for run in runs]
    assert ledgers[0] == ledgers[1] == ledgers[2]
    kept = [run.state.client_storage_bytes for run in runs]
    assert kept[0] == kept[1] == kept[2]
    assert [*kept[0]] == ["received"]  # earlier tasks' components and heads


def test_which_objective_a_client_has():
    heads = Message(Heads(((0, 1),), (0, 1)).to_message())
    for knobs, kind in (({}, Contrast), ({"strength": 0}, PromptObjective)):
        client = cprompt(**knobs).client(lively_context())
        client.prepare(Heads.from_message(heads))
        assert type(client.objective(image_shard(0, 0, *TASKS[0][0]), heads, {})) is kind


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_runs_in_half_precision_over_recurring_classes():
    run = learnt(cprompt(adam(precision="bfloat16")), lively_context(wire="bfloat16"), recurring())
    assert all(bool(torch.isfinite(value).all()) for value in model_of(run).values())
    assert np.isfinite(run.server.predict(TASKS[0][0][0]).numpy()).all()


# Knobs ----------------------------------------------------------------------------------------------------------------


def test_impossible_knobs_are_refused_in_a_line():
    with pytest.raises(UserError, match=r"method\.orthogonality=0\.1 contradicts method\.variant=published"):
        CPrompt(variant="published")
    for name, value in (("strength", -1), ("near", -1), ("margin", float("nan"))):
        with pytest.raises(UserError, match=rf"^method\.{name}="):
            typed_instance(CPrompt, {name: value}, "method")
    assert CPrompt(variant="published", orthogonality=0).softmax
    defaults = CPrompt()
    assert (defaults.training.lr, defaults.training.rounds, defaults.orthogonality) == (1e-4, 40, 0.1)
