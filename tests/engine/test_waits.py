"""How often the host would wait for a GPU, counted on a simulated one; and that all methods would run on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fcl_bench.backbones.backbone import Trainable, copies
from fcl_bench.backbones.network_extractor import NetworkExtractor
from fcl_bench.backbones.tiny import Tiny
from fcl_bench.data.sources.digits import Digits
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.distillation.fedntd import FedNTD
from fcl_bench.protocol.context import Context, WireFormat
from fcl_bench.protocol.method import Method
from fcl_bench.training.knobs import Training
from tests.methods.test_every_method import METHODS, every_method
from tests.methods.test_gpu import classifier_on
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context
from tests.simulated_cuda import CUDA, Counted, OnCuda, simulated_cuda
from tests.small_runs import run_in

ONCE = Training(rounds=1, epochs=1, batch_size=4, lr=0.05, augment="crop_flip")


# The simulation -------------------------------------------------------------------------------------------------------


def test_the_simulation_computes_as_the_cpu_and_refuses_what_cuda_refuses():
    here = torch.randn(3, 4)
    with simulated_cuda() as counted:
        there = here.to("cuda")
        assert isinstance(there, OnCuda)
        assert there.device == CUDA
        assert torch.equal((there @ there.T).cpu(), here @ here.T)
        assert there[torch.tensor([0, 2])].device == CUDA
        assert torch.equal(there[:, [0, 3]].cpu(), here[:, [0, 3]])
        assert there.new_tensor([1.5]).tolist() == [1.5]
        with pytest.raises(RuntimeError, match="same device"):
            there + here
        with pytest.raises(RuntimeError, match="same device"):
            there.index_select(0, torch.tensor([0, 2]))
        with pytest.raises(RuntimeError, match="indices should be"):
            here[torch.tensor([0, 2], device="cuda")]
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
    assert dict(counted.waits) == {"copy to the host": 3}
    assert counted.uploads == 5  # the tensor itself, two new ones, and two with indices


def test_the_simulation_counts_what_waits():
    with simulated_cuda() as counted:
        values = torch.arange(4.0, device="cuda")
        assert float(values.sum()) == 6
        assert bool((values >= 0).all())
        assert values[values > 1].tolist() == [2, 3]
        torch.cuda.synchronize()
    assert dict(counted.waits) == {"item": 2, "nonzero": 1, "copy to the host": 1, "synchronize": 1}


def test_the_simulation_trains():
    torch.manual_seed(0)
    here = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(16, 2)
    )
    images = torch.randn(5, 3, 4, 4)
    gradients = []
    for device in ("cpu", "cuda"):
        with simulated_cuda() as counted:
            network = here.to(device)
            network.zero_grad()
            network(images.to(device)).square().sum().backward()
            gradients.append([weight.grad.cpu() for weight in network.parameters()])
    assert all(torch.equal(*both) for both in zip(*gradients, strict=True))
    assert counted.kernels["convolution_backward"] == 1


# A client's round -----------------------------------------------------------------------------------------------------


def counted_round(method: Method, context: Context, tasks: Callable[[int], list]) -> Counted:
    """What one more client adds to a task."""
    found = []
    for clients in (2, 3):
        with simulated_cuda() as counted:
            there = dataclasses.replace(context, device=torch.device("cuda"))
            federation_of(method, there, tasks(clients)).run(lambda _: None)
        found.append(counted)
    return found[1] - found[0]


def images(clients: int, each: int = 8) -> list:
    return image_tasks(np.random.default_rng(0), [2], [[each] * clients], 16)


@pytest.fixture(scope="module")
def resnet18() -> Context:
    """Of ResNet-18's shape, and as wide: 62 tensors that train, and the statistics of 20 batch norms."""
    import timm

    start = Trainable(
        "resnet18", copies(timm.create_model("resnet18", num_classes=0)), 512, 16, (0.5,) * 3, (0.2,) * 3, (), {}
    )
    return Context(512, 0, torch.float64, torch.device("cpu"), WireFormat(torch.float32), start)


@pytest.mark.slow
def test_the_host_waits_seven_times_for_a_client_however_large_the_network(resnet18):
    """Thrice for the stopwatch's ends, twice for numbers that must be finite, twice for those that must be in range."""
    large = counted_round(FedAvg(training=ONCE), resnet18, images)
    small = counted_round(FedAvg(training=ONCE), tiny_context(16), images)
    assert large.waits == small.waits == {"synchronize": 3, "item": 3, "copy to the host": 1}


@pytest.mark.slow
def test_a_step_waits_for_nothing_and_uploads_its_crops():
    """Four steps in place of two: of uploads only those of the crops' corners, one for each batch."""
    once, twice = (
        counted_round(
            FedAvg(training=ONCE, loss_classes="seen"),
            tiny_context(16),
            lambda clients, each=each: images(clients, each),
        )
        for each in (8, 16)
    )
    assert once.waits == twice.waits
    assert once.uploads == 1 + 2  # the samples' order, and the corners
    assert twice.uploads == 1 + 4


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedNTD(training=ONCE)], ids=lambda method: method.name)
def test_a_step_of_these_methods_waits_for_nothing_either(method):
    once, twice = (
        counted_round(method, tiny_context(16), lambda clients, each=each: images(clients, each)) for each in (8, 16)
    )
    assert once.waits == twice.waits


@pytest.mark.slow
def test_a_round_asks_for_few_kernels_besides_the_steps(resnet18):
    """Beside the two steps: a model is one buffer, however many tensors it has."""
    counted = counted_round(FedAvg(training=ONCE), resnet18, images)
    with simulated_cuda() as steps:
        body = resnet18.network.build().to("cuda")
        for _ in range(2):
            body(torch.randn(4, 3, 16, 16).to("cuda")).sum().backward()
    assert 0 < sum(counted.kernels.values()) - sum(steps.kernels.values()) < 60


#: Most waits for one more client in one task: its checks are of the upload's own kind. Most are numbers whose extremes,
#: traces and smallest eigenvalues the server looks at before it takes an upload in:
#: docs/explanation/hostile_uploads.md.
MOST_WAITS = {"fedklda of three maps": 60, "gaussian_sketch": 80}


@pytest.mark.slow_cases(
    "afcl",
    "afl with random features",
    "air",
    "air logits",
    "centred_sketch",
    "ds_al",
    "fedklda",
    "fedlda",
    "fedlda with random features",
    "fedran",
    "fedran floor",
    "ranpac",
    "stsa",
    "stsa_e",
)
@pytest.mark.slow_cases(
    "ranpac, a fold held out",
    "fedklda of three maps",
)
@every_method
def test_the_host_waits_for_a_closed_form_client_a_fixed_number_of_times(method):
    name = next(name for name, own in METHODS.items() if own is method)
    small, large = (
        counted_round(
            method,
            Context(inputs, 0, torch.float64, torch.device("cpu"), WireFormat(torch.float32)),
            lambda clients, inputs=inputs: feature_tasks(0, [4], [[40] * clients], inputs),
        )
        for inputs in (8, 24)
    )
    # The Gaussian sketch waits once more for each class that has fewer samples than there are inputs.
    assert sum(large.waits.values()) <= sum(small.waits.values()) + (5 if name == "gaussian_sketch" else 2)
    assert sum(large.waits.values()) <= MOST_WAITS.get(name, 45)


# All of it ------------------------------------------------------------------------------------------------------------


@every_method
def test_closed_forms_mix_no_devices(method):
    with simulated_cuda():
        there = classifier_on("cuda", method)
    assert torch.equal(there, classifier_on("cpu", method))


SMALL = (
    *("backbone=tiny", "backbone.width=4", "tasks=2", "clients=2", "beta=1", "seed=0"),
    *("method.training.rounds=1", "method.training.epochs=1", "method.training.precision=float32"),
)
PROJECTED = "method.columns=16"
VIT = ("backbone.architecture=vit", "profile=quick")
RUNS = [
    *(("fedavg",), ("fedprotip", PROJECTED), ("fot", PROJECTED, "method.share_of=inputs"), ("centralised",)),
    *(
        (name,)
        for name in ("fedprox", "feddyn", "scaffold", "moon", "fedntd", "feddisco", "fedgen", "fedewc", "fedlwf")
    ),
    *(("fedicarl", "method.memory=20"), ("fedavg", "method.ccvr=gaussian"), ("regmean",), ("fedspace",)),
    *(("fedavg", "method.training.aggregate=krum"), ("fedavg", "method.training.optimizer=adam")),
    *((name, *VIT) for name in ("l2p", "dualprompt", "coda_prompt", "cprompt", "pilora", "lorm")),
]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_runs_that_train_mix_no_devices(run, tmp_path):
    choice = (f"method={run[0]}", *run[1:], *SMALL)
    with simulated_cuda():
        there = run_in(tmp_path / "cuda", *choice, "device=cuda").record
    here = run_in(tmp_path / "cpu", *choice, "device=cpu").record
    assert there["environment"]["device"] == "cuda simulated on the CPU"
    # Attention takes another kernel for a device that is not the CPU, so that a sample or two may change sides.
    near = 1.0 if run[1:] == VIT else 0.0
    for mine, other in zip(there["metrics"]["accuracy"], here["metrics"]["accuracy"], strict=True):
        assert mine == pytest.approx(other, abs=near)


def test_features_come_back_while_the_next_batch_is_computed(monkeypatch):
    """The same numbers and order; the host waits once for each batch, after it has asked for the next one."""
    data = Digits().load()
    start = Tiny(width=4).trainable(data, seed=0)
    asked: list[str] = []
    with simulated_cuda() as counted:
        extractor = NetworkExtractor(start.build(), start, torch.device("cuda"), "float32")
        extractor.batch = 100
        body, synchronize = extractor.body, torch.cuda.Event.synchronize
        body.register_forward_hook(lambda *_: asked.append("computed"))
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: (asked.append("waited"), synchronize(self)))
        there = list(extractor.batches(data.test))
    assert asked[:5] == ["computed", "computed", "waited", "computed", "waited"]
    assert asked.count("waited") == asked.count("computed") == len(there)
    assert counted.waits == {"synchronize": len(there)}
    extractor = NetworkExtractor(start.build(), start, torch.device("cpu"), "float32")
    extractor.batch = 100
    assert all(torch.equal(*both) for both in zip(there, extractor.batches(data.test), strict=True))
