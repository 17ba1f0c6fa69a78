"""SGD on one client: the knobs and their errors, the step sizes, the loss, the optimiser, what it leaves alone."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from fcl_bench.backbones.backbone import Trainable, copies
from fcl_bench.data.images.batches import Augment, Samples, Standardise, epoch_batches
from fcl_bench.errors import UserError
from fcl_bench.linalg.tensors import average
from fcl_bench.training.knobs import Training, add_weight_decay
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective
from fcl_bench.training.trainer import Trainer
from fcl_bench.typed import typed_instance
from tests.methods.training_harness import CPU, image_tasks, tiny_context

#: Field -> values that are refused.
WRONG = {
    "rounds": [0, -1],
    "fraction": [0.0, -0.1, 1.1, math.nan],
    "epochs": [0],
    "batch_size": [1, 0],
    "lr": [0.0, -0.1, math.inf, math.nan],
    "momentum": [-0.1, 1.0, math.nan],
    "weight_decay": [-1e-4, math.inf, math.nan],
    "schedule": ["linear", "step"],
    "milestones": [[0], [5, -1]],
    "decay": [0.0, -1.0, math.nan],
    "weighting": ["size"],
    "augment": ["flip"],
    "precision": ["float16"],
    "optimizer": ["lion"],
    "rates": [{"heads": 0.0}, {"body": 0.1, "heads": -1.0}, {"heads": math.nan}],
    "server_optimizer": ["sgd"],
    "server_lr": [0.0, -0.1, math.inf, math.nan],
    "server_momentum": [-0.1, 1.0, math.nan],
    "aggregate": ["average"],
    "trimmed": [-0.1, 0.5, math.nan],
    "byzantine": [-1],
}


def samples(count: int = 20, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    [[client]] = image_tasks(np.random.default_rng(0), [classes], [[count]])
    return client


def network_of(start: Trainable, sizes: list[int]) -> Network:
    network = Network(start).to(memory_format=torch.channels_last)
    network.grow(sizes, 3)
    network.freeze(())
    return network


def trainer_of(start: Trainable, **knobs) -> Trainer:
    return Trainer(Training(**knobs), Standardise(start.size, start.mean, start.std), CPU)


def plain_sgd(
    network: Network, start: Trainable, knobs: Training, images, labels, rate: float, seed: int, loss=None
) -> None:
    """The textbook loop with torch's own optimiser, weight decay included."""
    optimiser = torch.optim.SGD(network.parameters(), lr=rate, momentum=knobs.momentum, weight_decay=knobs.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    augment, standardise = Augment(knobs.augment), Standardise(start.size, start.mean, start.std)
    network.train()
    for _ in range(knobs.epochs):
        for chosen in epoch_batches(len(images), knobs.batch_size, generator):
            optimiser.zero_grad()
            scores = network(standardise(augment(images[chosen], generator)))
            (loss or torch.nn.functional.cross_entropy)(scores, labels[chosen]).backward()
            optimiser.step()


def same_tensors(first: Network, second: Network) -> bool:
    theirs = second.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in first.state_dict().items())


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_an_impossible_knob_is_named_with_its_key_and_value(name, value):
    with pytest.raises(UserError, match=rf"^adapt\.training\.{name}\b.*\(.+\)$") as error:
        typed_instance(Training, {name: value}, "adapt.training").check("adapt.training")
    shown = value[-1] if isinstance(value, list) else [*value.values()][-1] if isinstance(value, dict) else value
    assert str(shown) in str(error.value)


def test_every_knob_has_a_wrong_value_here():
    assert set(WRONG) == {field.name for field in dataclasses.fields(Training)}


def test_the_knobs_of_the_papers_are_possible():
    Training().check("method.training")
    Training(rounds=100, epochs=2, batch_size=128, lr=0.04, momentum=0.9, schedule="cosine").check("adapt.training")
    Training(schedule="step", milestones=[50, 75], weight_decay=0, fraction=0.01, batch_size=2).check("method.training")


@pytest.mark.parametrize("rounds", [1, 7])
def test_step_sizes_follow_their_formulas(rounds):
    for round_ in range(rounds):
        assert Training(rounds=rounds, lr=0.3).rate(round_) == 0.3
        cosine = 0.15 * (1 + math.cos(math.pi * round_ / rounds))
        assert Training(rounds=rounds, lr=0.3, schedule="cosine").rate(round_) == pytest.approx(cosine, rel=1e-15)
        knobs = Training(rounds=rounds, lr=0.3, schedule="exponential", decay=0.2)
        assert knobs.rate(round_) == pytest.approx(0.3 * math.exp(round_ / rounds * math.log(0.2)), rel=1e-15)
        step = 0.3 * (0.5 if round_ >= 2 else 1) * (0.5 if round_ >= 5 else 1)
        knobs = Training(rounds=rounds, lr=0.3, schedule="step", milestones=[2, 5], decay=0.5)
        assert knobs.rate(round_) == pytest.approx(step, rel=1e-15)


def test_a_cosine_may_end_above_zero():
    """Torch's cosine annealing from 0.04 towards 0.001 in 100 rounds, as LANDER has it."""
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.04)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 100, eta_min=1e-3)
    ours = Training(rounds=100, lr=0.04, schedule="cosine_decay", decay=0.025)
    for round_ in range(100):
        assert ours.rate(round_) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimiser.step()
        theirs.step()


def test_a_cosine_starts_at_lr_and_only_falls():
    rates = [Training(rounds=9, lr=0.3, schedule="cosine").rate(round_) for round_ in range(9)]
    assert rates[0] == 0.3
    assert all(later < earlier for earlier, later in pairwise(rates))
    assert rates[-1] > 0


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 5e-3)])
def test_training_is_torchs_sgd_bit_for_bit(augment, momentum, weight_decay):
    start = tiny_context().network
    images, labels = samples()
    knobs = Training(epochs=3, batch_size=8, lr=0.05, momentum=momentum, weight_decay=weight_decay, augment=augment)
    ours, plain = network_of(start, [3]), network_of(start, [3])
    Trainer(knobs, Standardise(start.size, start.mean, start.std), CPU).train(
        ours, Samples(images, labels), 0.05, 11, Objective()
    )
    plain_sgd(plain, start, knobs, images, labels, 0.05, 11)
    assert same_tensors(ours, plain)
    assert not same_tensors(ours, network_of(start, [3]))


def test_a_task_whose_classes_alone_compete_leaves_the_other_heads_without_a_gradient():
    start = tiny_context().network
    images, labels = samples()
    knobs = Training(epochs=2, batch_size=8, lr=0.05, weight_decay=0.0, augment="none")
    ours, plain = network_of(start, [4, 3]), network_of(start, [4, 3])
    trainer_of(start, **dataclasses.asdict(knobs)).train(
        ours, Samples(images, labels + 4), 0.05, 1, Objective(Heads(((0, 1, 2, 3), (4, 5, 6)), (4, 5, 6)), "task")
    )

    def own_classes(scores, truth):
        of_task = torch.log_softmax(scores[:, 4:], dim=1)
        return -of_task[torch.arange(len(truth)), truth].mean()

    plain_sgd(plain, start, knobs, images, labels, 0.05, 1, own_classes)
    theirs = plain.state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)
    untouched = network_of(start, [4, 3])
    assert torch.equal(ours.heads[0].weight, untouched.heads[0].weight)
    assert not torch.equal(ours.heads[1].weight, untouched.heads[1].weight)


def test_the_loss_is_the_mean_cross_entropy_over_the_classes_that_compete():
    start = tiny_context().network
    network = network_of(start, [2, 3]).eval()
    images = torch.randn(6, 3, 8, 8)
    truth = torch.tensor([2, 3, 4, 4, 2, 3])
    scores = network(images).detach().double().numpy()
    heads = Heads(((0, 1), (2, 3, 4)), (2, 3, 4))
    for over, shown in (("seen", slice(None)), ("task", slice(2, 5))):
        exponentials = np.exp(scores)
        share = exponentials[np.arange(6), truth.numpy()] / exponentials[:, shown].sum(axis=1)
        found = float(Objective(heads, over).loss(network, images, truth).detach())
        assert found == pytest.approx(-np.log(share).mean(), rel=1e-5)


def test_only_what_is_not_frozen_gets_weight_decay():
    start = tiny_context().network
    images, labels = samples()
    network = network_of(start, [3])
    network.freeze({"body.stage1.0.weight", "heads.0.bias"})
    before = {name: value.clone() for name, value in network.state_dict().items()}
    trainer_of(start, epochs=1, weight_decay=0.5).train(network, Samples(images, labels), 0.1, 0, Objective())
    same = {name for name, value in network.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"body.stage1.0.weight", "heads.0.bias"}


def test_weight_decay_adds_to_gradients_and_passes_by_those_without():
    weights = [torch.nn.Parameter(torch.tensor([2.0, -4.0])) for _ in range(2)]
    weights[0].grad = torch.tensor([1.0, 1.0])
    add_weight_decay(weights, 0.25)
    assert weights[0].grad.tolist() == [1.5, 0.0]
    assert weights[1].grad is None
    add_weight_decay(weights[1:], 0.25)


def test_a_single_image_trains_on_the_running_statistics_and_leaves_them():
    start = tiny_context().network
    images, labels = samples(count=1, classes=1)
    network = network_of(start, [3])
    before = {name: value.clone() for name, value in network.state_dict().items()}
    trainer_of(start, epochs=3).train(network, Samples(images, labels), 0.1, 0, Objective())
    after = network.state_dict()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {name for name, _ in network.named_parameters()}
    assert all(bool(torch.isfinite(value).all()) for value in after.values())


@pytest.mark.parametrize("count", [2, 3, 8, 9, 17])
def test_any_number_of_images_trains(count):
    """9 and 17 images in batches of 8 would leave a single one, on which batch norm can't train."""
    start = tiny_context().network
    images, labels = samples(count, classes=2)
    network = network_of(start, [2])
    trainer_of(start, epochs=2, batch_size=8).train(network, Samples(images, labels), 0.1, 0, Objective())
    assert all(bool(torch.isfinite(value).all()) for value in network.state_dict().values())


def with_dropout() -> Trainable:
    plain = tiny_context().network
    body = plain.build()
    body.add_module("dropout", torch.nn.Dropout(0.5))
    return dataclasses.replace(plain, build=copies(body))


@pytest.mark.parametrize("start", [tiny_context().network, with_dropout()], ids=["plain", "dropout"])
def test_a_round_depends_on_its_seed_alone_and_leaves_torchs_generator_where_it_was(start):
    images, labels = samples()
    trained = []
    for state, seed in ((1, 0), (2, 0), (1, 5)):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        network = network_of(start, [3])
        torch.set_rng_state(before)
        trainer_of(start, epochs=1).train(network, Samples(images, labels), 0.1, seed, Objective())
        assert torch.equal(torch.get_rng_state(), before)
        trained.append(network)
    assert same_tensors(trained[0], trained[1])
    assert not same_tensors(trained[0], trained[2])


def test_training_leaves_its_images_and_labels_as_they_were():
    start = tiny_context().network
    images, labels = samples()
    before = images.clone(), labels.clone()
    trainer_of(start, epochs=2).train(
        network_of(start, [3]), Samples(images, labels), 0.1, 0, Objective(Heads(((0, 1, 2),), (0, 1, 2)), "task")
    )
    assert torch.equal(images, before[0])
    assert torch.equal(labels, before[1])


def test_a_method_sees_each_gradient_with_weight_decay_in_it_and_may_change_it():
    """Every step's direction set to zero leaves the weights as they are; `finish` comes last, once."""
    start = tiny_context().network
    images, labels = samples()
    log = []

    class Nothing(Objective):
        def modify_gradients(self, network):
            log.append(network.heads[0].weight.grad.abs().sum())
            for weight in network.parameters():
                weight.grad.zero_()

        def finish(self, network):
            log.append("finish")

    network = network_of(start, [3])
    before = {name: value.clone() for name, value in network.named_parameters()}
    knobs = {"epochs": 2, "batch_size": 10, "momentum": 0.9, "weight_decay": 1e6}
    trainer_of(start, **knobs).train(network, Samples(images, labels), 0.1, 0, Nothing())
    assert all(torch.equal(value, before[name]) for name, value in network.named_parameters())
    assert len(log) == 5
    assert log[-1] == "finish"
    expected = 1e6 * before["heads.0.weight"].abs().sum()
    torch.testing.assert_close(log[0], expected, rtol=1e-3, atol=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lr", [1e6, 1e15, 1e30])
@pytest.mark.parametrize("batch_size", [4, 20])
def test_a_diverging_training_is_the_users_to_mend(lr, batch_size):
    """However it shows: in a loss, or only in what the last step leaves in weights and running statistics."""
    start = tiny_context().network
    images, labels = samples()
    network = network_of(start, [3])
    trainer = trainer_of(start, epochs=1, batch_size=batch_size, lr=lr)

    def rounds(count):
        for round_ in range(count):
            trainer.train(network, Samples(images, labels), lr, round_, Objective())
            wrong = [name for name, value in network.state_dict().items() if not bool(torch.isfinite(value).all())]
            assert wrong == []

    with pytest.raises(UserError, match=r"training\.lr=1e\+\d+: training diverged.*\(a smaller .*training\.lr\)"):
        rounds(60)


@pytest.mark.parametrize("count", [5, 300])
def test_features_are_the_bodys_in_evaluation_mode(count):
    """In one batch or several; the network need not be in evaluation mode before."""
    start = tiny_context().network
    images, _ = samples(count)
    network = network_of(start, [3]).train()
    network.body(torch.randn(8, 3, 8, 8))
    found = trainer_of(start).features(network, images)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    with torch.no_grad():
        expected = network.eval().body((images / 255 - 0.5) / 0.5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_asked_for_on_a_cpu_and_comes_close():
    start = tiny_context().network
    images, labels = samples()
    features, losses = {}, {}
    for precision in ("auto", "float32", "bfloat16"):
        network = network_of(start, [3])
        trainer = trainer_of(start, epochs=4, lr=0.1, precision=precision, augment="none")
        trainer.train(network, Samples(images, labels), 0.1, 0, Objective())
        features[precision] = trainer.features(network, images)
        assert features[precision].dtype == torch.float32
        assert next(network.parameters()).dtype == torch.float32
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(network.logits(features[precision]), labels)
        losses[precision] = float(loss)
    assert torch.equal(features["auto"], features["float32"])
    assert not torch.equal(features["bfloat16"], features["float32"])
    assert losses["bfloat16"] == pytest.approx(losses["float32"], abs=0.1)


def test_the_average_is_taken_in_float64_and_given_in_float32():
    sums = {"a": torch.tensor([2.0**30 + 1, 3.0], dtype=torch.float64)}
    mean = average(sums, 3.0)["a"]
    assert mean.dtype == torch.float32
    np.testing.assert_array_equal(mean.numpy(), np.array([(2.0**30 + 1) / 3, 1.0]).astype(np.float32))
