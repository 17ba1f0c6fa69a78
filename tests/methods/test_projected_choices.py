"""Choices of FedProTIP and FOT that their public codes decide: what trains, what is frozen, what the bases are of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.fot import FOT, share_of_rest
from fcl_bench.methods.projection.projected import basis_name
from fcl_bench.methods.projection.task_identity import HeadRank, Tip
from fcl_bench.training.layer_inputs import all_rows
from tests.methods import fedprotip_oracle as oracle
from tests.methods.fedprotip_harness import (
    HEADS,
    bases_of,
    fedprotip_of,
    linear_context,
    observed,
    three_tasks,
    training,
)
from tests.methods.training_harness import (
    image_shard,
    image_tasks,
    images_stream,
    learn_images,
    tiny_context,
)
from tests.methods.whole_runs import feature_context
from tests.small_runs import run_in, settings_for


def fot_of(knobs: dict | None = None, **own) -> FOT:
    return FOT(training=training(**(knobs or {})), **{"frozen_stages": 1, "threshold": 0.8, **own})


# Heads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("with tip", "without")
@pytest.mark.parametrize("tip", [Tip(), None], ids=["with tip", "without"])
def test_heads_that_train_freely_are_not_projected_and_their_biases_train(tip):
    result = observed(fedprotip_of(projected_heads=False, tip=tip), tiny_context(), three_tasks())
    body = [row for row in result.clients + result.averages if not row[1].startswith(HEADS)]
    assert max(leak for *_, leak in body) <= 1e-5
    heads = [leak for _, name, leak in result.clients if name.startswith(HEADS)]
    assert bool(heads) == (tip is not None)  # without task prediction the heads' inputs have no bases
    assert all(leak > 1e-2 for leak in heads)
    for task in (1, 2):
        now = result.states[task]
        assert now[f"heads.{task}.bias"].any()
        assert torch.equal(now["heads.0.weight"], result.states[0]["heads.0.weight"])
    uploads = [message for (task, stage, _), message in result.uploads.items() if task and stage == "bases"]
    assert all((HEADS in message) == (tip is not None) for message in uploads)


@pytest.mark.slow
def test_fot_with_free_heads_takes_no_subspace_of_their_inputs():
    context, tasks = tiny_context(), three_tasks()
    ranks = {
        projected: learn_images(fot_of(projected_heads=projected), context, tasks).report()["ranks"]
        for projected in (True, False)
    }
    assert ranks[True].keys() - ranks[False].keys() == {HEADS}


@pytest.mark.parametrize(("age", "rests"), [(1, {0, 1, 2}), (2, {0, 1}), (3, {0}), (9, set())])
def test_a_head_is_frozen_once_it_is_old_enough(age, rests):
    tasks = image_tasks(np.random.default_rng(0), [2] * 4, [[8, 8]] * 4)
    method = fedprotip_of(frozen_head_age=age, projected_heads=False)
    server = method.server(tiny_context())
    for task in images_stream(tasks):
        server.start_task(task)
    frozen = method.frozen(server.network, 3)
    heads = {f"heads.{head}.{kind}" for head in range(4) for kind in ("weight", "bias")}
    assert frozen & heads == {f"heads.{head}.{kind}" for head in rests for kind in ("weight", "bias")}


# Batch norms ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases(
    "decay-fedprotip", "decay-fot", "frozen-fedprotip", "frozen-fot", "train-fedprotip", "train-fot"
)
@pytest.mark.parametrize("method_of", [fedprotip_of, fot_of], ids=["fedprotip", "fot"])
@pytest.mark.parametrize("norms", ["frozen", "decay", "train"])
def test_batch_norms_after_the_first_task(norms, method_of):
    """Frozen to the bit; or their statistics move, and their weights take weight decay alone; or they train."""
    tasks = image_tasks(np.random.default_rng(0), [3, 2], [[24, 16], [24, 16]])
    knobs = {"rounds": 2, "epochs": 3, "momentum": 0.0, "weight_decay": 5e-2, "lr": 0.05, "batch_size": 8}
    states = []
    learn_images(
        method_of(knobs, norms=norms),
        tiny_context(),
        tasks,
        after=lambda _, server: states.append(
            {name: value.clone() for name, value in server.network.state_dict().items()}
        ),
    )
    before, now = (
        {name: state[f"body.stage3.1.{name}"] for name in ("weight", "bias", "running_mean", "running_var")}
        for state in states
    )
    same = {name: torch.equal(before[name], now[name]) for name in before}
    assert same["running_mean"] == same["running_var"] == same["weight"] == (norms == "frozen")
    # Client 0 makes 9 steps a round, client 1 makes 6; the average is weighted by their samples.
    factor = ((24 * (1 - 0.05 * 5e-2) ** 9 + 16 * (1 - 0.05 * 5e-2) ** 6) / 40) ** 2
    shrunk = all(torch.allclose(now[name], before[name] * factor, rtol=1e-4, atol=1e-7) for name in ("weight", "bias"))
    assert shrunk == (norms == "decay")
    # The first stage is frozen in all of them.
    assert torch.equal(states[0]["body.stage1.1.weight"], states[1]["body.stage1.1.weight"])
    leaks = observed(method_of(knobs, norms=norms), tiny_context(), tasks).averages
    assert leaks
    assert max(leak for *_, leak in leaks) <= 1e-5


# Bases ----------------------------------------------------------------------------------------------------------------


def test_one_client_after_the_other_adds_what_those_before_it_leave():
    """Equal clients: the second adds nothing, where the union of what each finds alone is the same."""
    rng = np.random.default_rng(0)
    images, labels = image_tasks(rng, [3], [[24]])[0][0]
    tasks = [[(images, labels), (images, labels), (images[:0], labels[:0])]]
    context = replace(tiny_context(), clients=3)
    sent, method = {}, fedprotip_of(extension="sequential", share_of="inputs", mass="energy", threshold=0.8)
    server = learn_images(
        method, context, tasks, seen=lambda k, broadcast, message: sent.setdefault((k, message.stage), message)
    )
    assert method.stages(images_stream(tasks)[0]).count("bases") == 1
    assert server.rounds(images_stream(tasks)[0]) == 2 + 3 + 1  # a round for each of three clients, one of them empty
    for layer, bases in bases_of(server).items():
        first, second = (sent[k, "bases"][layer].shape[1] for k in (0, 1))
        assert first > 0 == second
        assert bases[0].shape[1] == first


def test_a_share_of_the_inputs_counts_what_earlier_bases_hold():
    """The same task again: nothing is new, while of the rest some share always is."""
    images, labels = image_tasks(np.random.default_rng(0), [2], [[24, 24]])[0][0]
    tasks = [[(images, labels)], [(images, labels + 2)]]
    ranks = {}
    for share_of in ("rest", "inputs"):
        # No round trains anything that matters: the learning rate leaves the inputs as they are.
        method = fedprotip_of(
            {"rounds": 1, "lr": 1e-9}, share_of=share_of, mass="energy", threshold=0.8, threshold_step=0.0
        )
        ranks[share_of] = learn_images(method, linear_context(8, 12), tasks).report()["ranks"][HEADS]
    assert ranks["inputs"][0] == ranks["rest"][0] > 0
    assert ranks["inputs"][1] == 0 < ranks["rest"][1]


def test_bases_of_augmented_images_are_of_other_images():
    tasks, found = three_tasks()[:1], []
    for augmented in (False, True):
        method = fedprotip_of({"augment": "crop_flip", "rounds": 1}, augmented_bases=augmented)
        client = method.client(tiny_context())
        images = tasks[0][0][0]
        client_data = type("Shard", (), {"inputs": images, "task": 0, "client": 0})
        found.append(client.images_of(client_data))
        assert torch.equal(client.images_of(client_data), found[-1])
    assert torch.equal(found[0], tasks[0][0][0])
    assert not torch.equal(found[1], found[0])
    assert found[1].shape == found[0].shape


def test_a_sketch_of_no_new_direction_tells_nothing_of_the_samples():
    """It has columns, as every sketch has, and all are zero; layers whose inputs are not all known tell something."""
    context, tasks = tiny_context(), image_tasks(np.random.default_rng(0), [3, 2], [[20], [12]])
    method = fedprotip_of({"rounds": 1}, sketch=8)
    server = learn_images(method, context, tasks[:1])
    full = "body.stage2.0"
    server.bases[basis_name(0, full)] = torch.eye(36)
    _, second = images_stream(tasks)
    server.start_task(second)
    client = method.client(context)
    broadcast = replace(server.broadcast(second, method.stages(second).index("bases")), task=1, round=1)
    upload, _ = client.update(image_shard(0, 1, *tasks[1][0]), broadcast, {})
    assert upload[full].shape == (36, 8)
    assert not upload[full].any()
    assert set(upload.groups[full].tolist()) == {-1}
    assert all(upload[layer].any() for layer in upload.keys() - upload.groups.keys())


# FOT: sketches of all inputs, and the threshold -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_sketch_of_all_inputs_has_their_second_moments():
    """Of E[A A'] = s X X', X being every unfolded patch of every image."""
    context, tasks, sent = tiny_context(), image_tasks(np.random.default_rng(0), [2], [[20]]), {}
    method = fot_of({"rounds": 1}, columns=None, sketch=200.0, frozen_stages=1)
    seen = lambda k, broadcast, message: sent.update({message.stage: message})  # noqa: E731
    server = learn_images(method, context, tasks, seen=seen)
    network = server.network.eval()
    given = {}
    for stage in (2, 3):
        module = network.body.get_submodule(f"stage{stage}.0")
        module.register_forward_hook(lambda module, inputs, _, stage=stage: given.update({stage: (module, inputs[0])}))
    with torch.inference_mode():
        network.body(server.trainer.standardise(tasks[0][0][0]))
    for stage, (module, inputs) in given.items():
        X = np.concatenate(
            [oracle.unfold(x.double().numpy(), module.kernel_size, module.stride, module.padding) for x in inputs],
            axis=1,
        )
        np.testing.assert_allclose(all_rows(inputs, module).double().numpy().T, X, atol=1e-6)
        A = sent["bases"][f"body.stage{stage}.0"].double().numpy()
        ratio = A @ A.T / A.shape[1]
        assert np.linalg.norm(ratio - X @ X.T) <= 0.1 * np.linalg.norm(X @ X.T)


def test_fots_formula_protects_more_than_its_threshold():
    """Norms where squares are meant: 93.5 % of the inputs' squares at epsilon 0.87, where half of their norm is new."""
    epsilon, rho = 0.87, 0.5
    held = 1 - rho**2
    assert held == 0.75
    assert share_of_rest(epsilon, rho) == pytest.approx(0.74)
    assert held + rho**2 * share_of_rest(epsilon, rho) == pytest.approx(0.935)
    consistent = (rho**2 - (1 - epsilon)) / rho**2
    assert consistent == pytest.approx(0.48)
    assert held + rho**2 * consistent == pytest.approx(epsilon)


def test_fots_threshold_is_a_share_of_all_inputs():
    """(rho - (1 - epsilon)) / rho with rho = ||X - Phi Phi' X|| / ||X||, weighted by samples; all of it if no basis."""
    assert share_of_rest(0.87, 1.0) == pytest.approx(0.87)
    assert share_of_rest(0.87, 0.5) == pytest.approx((0.5 - 0.13) / 0.5)
    assert share_of_rest(0.87, 0.1) < 0
    assert share_of_rest(0.87, 0.0) == 0
    context, sent = linear_context(), {}
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[20, 30], [18, 12]], size=3)
    method = fot_of({"rounds": 1}, share_of="inputs", frozen_stages=0, threshold_step=0.0)
    bases = []
    server = learn_images(
        method,
        context,
        tasks,
        seen=lambda k, broadcast, message: sent.update({(k, message.stage): (broadcast, message)}),
        after=lambda _, server: bases.append(
            {layer: [U.clone() for U in found] for layer, found in bases_of(server).items()}
        ),
    )
    start = context.network
    mean, std = (np.array(value).reshape(1, 3, 1, 1) for value in (start.mean, start.std))
    Phi = bases[0]["body.linear"][0].double().numpy()
    total, outside = 0, 0.0
    for k, (images, _) in enumerate(tasks[1]):
        X = ((images.double().numpy() / 255 - mean) / std).reshape(len(images), -1).T
        share = np.linalg.norm(X - Phi @ Phi.T @ X) / np.linalg.norm(X)
        outside += len(images) / 30 * share
        message = sent[k, "bases"][1]
        assert message.samples == len(images)
        assert float(message["outside"][0]) == pytest.approx(len(images) * share, rel=1e-4)
        total = total + message["body.linear"].double().numpy()
    rest = np.linalg.svd(total - Phi @ Phi.T @ total, compute_uv=False) ** 2
    wanted = (outside - (1 - 0.8)) / outside
    rank = int(np.sum(np.cumsum(rest) / rest.sum() < wanted)) + 1
    assert bases[1]["body.linear"][1].shape[1] == rank
    # As published, one less; and more of a share is asked of the rest where the bases do not count.
    published = learn_images(replace(method, variant="published"), context, tasks[:1])
    assert published.bases["basis.0.body.linear"].shape[1] == bases[0]["body.linear"][0].shape[1] - 1
    assert server.report()["ranks"]["body.linear"][1] == rank


# The configuration ----------------------------------------------------------------------------------------------------


def knobs(method: str, *typed: str):
    return settings_for(Path("nowhere"), f"method={method}", "data=digits", "backbone=tiny", *typed).method


@pytest.mark.slow
def test_the_variant_sets_what_is_not_typed():
    ours, theirs = (knobs("fedprotip", f"method.variant={variant}") for variant in ("working", "published"))
    assert ours == FedProTIP()
    assert (theirs.threshold, theirs.mass, theirs.share_of) == (0.775, "energy", "inputs")
    assert (theirs.extension, theirs.head_rank, theirs.norms) == ("sequential", HeadRank(30, 20), "decay")
    assert (theirs.projected_heads, theirs.projected_decay, theirs.augmented_bases) == (False, False, True)
    assert (theirs.loss_classes, theirs.training.weighting) == ("task", "uniform")
    assert theirs.training.augment == "crop_flip_brightness"
    assert (theirs.tip.rule, theirs.tip.references) == ("batches", "updated")
    mixed = knobs("fedprotip", "method.variant=published", "method.threshold=0.5", "method.head_rank=null")
    assert replace(mixed, threshold=0.775, head_rank=HeadRank(30, 20)) == theirs
    assert knobs("fedprotip", "method.variant=published", "method.tip=false").tip is None
    fot = knobs("fot", "method.variant=published")
    assert knobs("fot") == FOT()
    assert (fot.threshold, fot.threshold_step, fot.share_of, fot.columns) == (0.87, 0.001, "inputs", None)
    assert (fot.norms, fot.loss_classes, fot.projected_heads) == ("train", "task", False)
    assert fot.training.weighting == "uniform"


FEATURES = ("method.trains=features", "method.frozen_stages=0", "backbone=pixels")


@pytest.mark.slow_cases("fot on features", "without task prediction")
@pytest.mark.parametrize(
    "choice",
    [
        ("method=fedprotip", "method.tip=false", "backbone=tiny", "backbone.width=4"),
        ("method=fedprotip", *FEATURES),
        ("method=fot", "method.projected_heads=true", *FEATURES),
    ],
    ids=["without task prediction", "on features", "fot on features"],
)
def test_the_published_variant_makes_bases_without_those_of_heads_and_on_features(choice, tmp_path):
    """It ended after the first task's rounds: for want of the heads' bases, or since features were to be flipped."""
    small = ("data=digits", "tasks=2", "clients=2", "method.training.rounds=1", "method.training.epochs=1")
    ranks = run_in(tmp_path, *choice, *small, "method.variant=published").record["report"]["ranks"]
    assert ranks
    assert all(found[0] > 0 for found in ranks.values())


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ({"share_of": "inputs"}, "method.mass=sum"),
        ({"head_rank": HeadRank()}, "method.head_rank"),
        ({"extension": "sequential", "sketch": 8}, "method.sketch=8"),
        ({"tip": Tip(rule="batches")}, "method.tip.references=learnt"),
    ],
)
def test_choices_that_contradict_each_other_are_refused(own, key):
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        fedprotip_of(**own)


@pytest.mark.parametrize(
    "typed", [("method=fot",), ("method=fedprotip", "method.tip=false")], ids=lambda typed: typed[0].partition("=")[2]
)
def test_class_weights_alone_that_are_not_projected_leave_nothing_to_project(command, tmp_path, typed):
    choice = ("data=digits", "backbone=tiny", *typed, "method.trains=features", "method.frozen_stages=0", "tasks=2")
    code, _, err = command(*choice, f"out={tmp_path}")
    assert code == 2
    line = err.splitlines()[-1]
    assert "method.trains=features and method.projected_heads=false leave" in line
    assert "(method.projected_heads=true)" in line


@pytest.mark.parametrize("own", [{"projected_heads": True, "tip": None}, {"projected_heads": False}], ids=str)
def test_class_weights_that_are_projected_or_whose_inputs_tell_the_task_are_enough(own):
    fedprotip_of(trains="features", frozen_stages=0, **own).check(feature_context(), [2, 2])
    recurring = replace(feature_context(), recurring=True)
    FOT(training=training(), trains="features", frozen_stages=0).check(recurring, [2, 2])


@pytest.mark.parametrize(
    ("own", "clients", "told"),
    [
        (
            {"head_rank": HeadRank(3, 4), "extension": "sequential"},
            5,
            r"head_rank\.others=4 leaves no direction to",
        ),
        ({"projected_decay": False, "knobs": {"server_optimizer": "momentum"}}, 5, r"server_optimizer=momentum moves"),
        ({"projected_decay": False, "knobs": {"aggregate": "median"}}, 5, r"aggregate=median moves weights within"),
    ],
)
def test_choices_under_which_tasks_are_not_protected_or_told_apart_are_refused(own, clients, told):
    context, own = replace(tiny_context(), clients=clients), dict(own)
    with pytest.raises(UserError, match=told):
        fedprotip_of(own.pop("knobs", None), **own).check(context, [2, 2])


@pytest.mark.parametrize(
    ("own", "clients"),
    [
        ({"head_rank": HeadRank(3, 4), "extension": "sequential"}, 4),
        ({"head_rank": HeadRank(3, 0), "extension": "sequential"}, 5),
        ({"head_rank": HeadRank(3, 4), "extension": "sequential", "tip": None, "projected_heads": False}, 5),
        ({"projected_decay": True, "knobs": {"server_optimizer": "momentum"}}, 5),
        ({"projected_decay": False, "knobs": {"aggregate": "krum"}}, 5),
        ({"projected_decay": False, "projection": "global", "knobs": {"aggregate": "median"}}, 5),
    ],
)
def test_choices_beside_these_are_taken(own, clients):
    own = dict(own)
    fedprotip_of(own.pop("knobs", None), **own).check(replace(tiny_context(), clients=clients), [2, 2])
