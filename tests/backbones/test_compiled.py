"""Networks through torch's compiler: what runs compiled, what it agrees with, and what is refused.

Most tests compile into a backend that runs the captured graph as it is, which takes no C++ compiler and keeps all bits.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
import pkgutil
import shutil
from collections import Counter

import pytest
import torch

from fcl_bench.backbones import network_extractor
from fcl_bench.backbones.network_extractor import NetworkExtractor, compile_body, require_compiler
from fcl_bench.backbones.tiny import Tiny
from fcl_bench.data.sources.digits import Digits
from fcl_bench.errors import UserError
from fcl_bench.execution.predicting import Model
from fcl_bench.methods import gradient
from fcl_bench.methods.averaging.centralised import Centralised
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.feddisco import FedDisco
from fcl_bench.methods.averaging.feddyn import FedDyn
from fcl_bench.methods.averaging.fedprox import FedProx
from fcl_bench.methods.averaging.scaffold import Scaffold
from fcl_bench.methods.gradient import base
from fcl_bench.training.knobs import Training
from tests.methods.plain_training import made_tasks
from tests.methods.training_harness import federation_of, tiny_context
from tests.methods.whole_runs import assert_resumes, computed, learnt, model_of, same
from tests.small_runs import run_in, settings_for

CPU = torch.device("cpu")
METHODS = (FedAvg, FedProx, Scaffold, FedDyn, FedDisco, Centralised)
#: 9, 7 and 8 images in batches of 4: batches of 4, 3 and 1.
TASKS = made_tasks([[9, 7, 8], [8, 6, 3]], classes=3)
TRAINING = Training(rounds=2, epochs=1, batch_size=4, lr=0.05, momentum=0.5)
NEEDS_CXX = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")


#: How many graphs a test compiled, and how often graphs ran in it.
COUNT: Counter[str] = Counter()


def as_captured(graph, _):
    COUNT["graphs"] += 1

    def run(*values):
        COUNT["runs"] += 1
        return graph(*values)

    return run


@pytest.fixture
def ran(monkeypatch):
    """Nothing so far; graphs of earlier tests, which took seconds to capture, serve again."""
    monkeypatch.setattr(network_extractor, "BACKEND", as_captured)
    COUNT.clear()
    return COUNT


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    yield
    torch.compiler.reset()


def compiled_context():
    context = tiny_context()
    assert context.network is not None
    return dataclasses.replace(context, network=dataclasses.replace(context.network, compiled=True))


def features(size: int = 16, **knobs) -> torch.Tensor:
    digits = Digits().load()
    return torch.cat(list(Tiny(4, size, **knobs).open(digits, CPU).batches(digits.test)))


# What runs compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("conv", "vit")
@pytest.mark.parametrize("architecture", ["conv", "vit"])
def test_a_frozen_network_runs_compiled_whatever_the_size_of_its_batches(architecture, ran):
    """358 test images in two batches, of 256 and 102: one graph, which runs twice."""
    torch.compiler.reset()
    plain = features(architecture=architecture)
    assert not ran
    found = features(architecture=architecture, compile=True)
    assert dict(ran) == {"graphs": 1, "runs": 2}
    assert torch.equal(found, plain)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_steps_run_compiled_with_the_same_bits_of_the_same_graph(method, ran):
    """Two tasks, whose first stages freeze in the second, and a batch of a single image."""
    knobs = {} if method is Centralised else {"frozen_stages": 1}
    plain = learnt(method(training=TRAINING, **knobs), tiny_context(), TASKS)
    assert not ran
    found = learnt(method(training=TRAINING, **knobs), compiled_context(), TASKS)
    assert ran["runs"] > 20
    assert same(model_of(found), model_of(plain))
    assert computed(found) == computed(plain) != ({}, {})


@pytest.mark.slow
def test_neither_clients_nor_rounds_nor_tasks_compile_again(ran):
    """In training and in evaluation mode, with many images or one, a graph each; they serve the next network, too."""
    torch.compiler.reset()
    for _ in range(2):
        learnt(FedAvg(training=TRAINING), compiled_context(), TASKS)
    assert 1 < ran["graphs"] <= 5


def test_a_copy_runs_as_written(ran):
    body = torch.nn.Linear(3, 2)
    compile_body(body)
    copied = copy.deepcopy(body)
    assert torch.equal(copied(torch.ones(4, 3)), body(torch.ones(4, 3)))
    assert ran["runs"] == 1
    assert body.state_dict().keys() == copied.state_dict().keys() == {"weight", "bias"}


@pytest.mark.slow
def test_a_first_stage_and_the_features_after_it_run_compiled(ran, tmp_path):
    small = ("method=afl", "data=digits", "backbone=tiny", "backbone.width=4", "tasks=2", "clients=2", "beta=10")
    stage = ("adapt=fedavg", "adapt.training.rounds=1", "adapt.training.epochs=1")
    records = [run_in(tmp_path / way, *small, *stage, f"backbone.compile={way}").record for way in ("false", "true")]
    assert ran["runs"] > 10
    assert records[0]["metrics"] == records[1]["metrics"]
    assert records[0]["run_id"] != records[1]["run_id"]
    assert [record["features"].get("compiled") for record in records] == [None, "true"]


@pytest.mark.slow
def test_the_model_of_a_run_predicts_compiled(ran, tmp_path, monkeypatch):
    small = ("method=afl", "data=digits", "backbone=tiny", "backbone.width=4", "tasks=2", "clients=2")
    outcome = run_in(tmp_path, *small, "backbone.compile=true")
    ran.clear()
    images, file = Digits().load().test.inputs.pixels[:9], outcome.folder / "model.safetensors"
    assert len(Model(file, "cpu").predict(images)) == 9
    assert ran["runs"] == 1
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"^backbone.compile=true: "):
        Model(file, "cpu").predict(images)


def test_the_key_is_part_of_the_id(tmp_path):
    ids = [settings_for(tmp_path, "backbone=tiny", *more).identity() for more in ((), ("backbone.compile=true",))]
    assert ids[0]["backbone"]["compile"] is False
    assert ids[1] == {**ids[0], "backbone": {**ids[0]["backbone"], "compile": True}}


# What is refused ------------------------------------------------------------------------------------------------------


def test_other_methods_refuse_it_with_those_that_do_not(tmp_path):
    assert tuple(method.name for method in METHODS) == base._COMPILE
    with pytest.raises(UserError, match=r"^backbone.compile=true: method=moon .*fedavg, fedprox, scaffold"):
        run_in(tmp_path, "method=moon", "backbone=tiny", "backbone.compile=true")
    with pytest.raises(UserError, match=r"^backbone.compile=true: adapt=pilora "):
        run_in(tmp_path, "method=afl", "adapt=pilora", "backbone=tiny", "backbone.compile=true")


def test_the_methods_that_compile_are_those_that_say_so():
    for module in pkgutil.iter_modules(gradient.__path__):
        importlib.import_module(f"{gradient.__name__}.{module.name}")
    known, found = [base.GradientMethod], set()
    while known:
        known += known[0].__subclasses__()
        kind = known.pop(0)
        if kind.__module__.startswith("fcl_bench.methods") and kind.compiles:
            found.add(kind.name)
    assert found == set(base._COMPILE)


def test_without_a_compiler_a_run_does_not_begin(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"^backbone.compile=true: .*no-such-compiler is not there \("):
        run_in(tmp_path, "method=fedavg", "backbone=tiny", "backbone.compile=true")
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(UserError, match=r"^backbone.compile=true: the package triton "):
        require_compiler(torch.device("cuda"))


def test_what_cannot_be_compiled_as_a_whole_ends_with_a_line(ran):
    class Fickle(torch.nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    body = Fickle()
    compile_body(body)
    with pytest.raises(UserError, match=r"^backbone.compile=true: torch could not compile the network: "):
        body(torch.ones(2, 3))


# With torch's own backend ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@NEEDS_CXX
def test_compiled_features_agree_to_rounding():
    """docs/how-to/gpu.md: within 1e-5 of the largest; batch norms have statistics, as of a network that was trained."""
    digits, draws = Digits().load(), torch.Generator().manual_seed(0)
    start = Tiny(4, 16).trainable(digits, 0)
    body = start.build()
    for norm in body.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_mean.normal_(generator=draws)
            norm.running_var.uniform_(0.5, 2, generator=draws)
    plain, found = (
        torch.cat(list(NetworkExtractor(body, dataclasses.replace(start, compiled=way), CPU).batches(digits.test)))
        for way in (False, True)
    )
    assert 0 < float((found - plain).abs().max()) <= 1e-5 * float(plain.abs().max())


@pytest.mark.slow
@NEEDS_CXX
def test_compiled_models_agree_to_rounding_and_resume_with_the_same_bits():
    """docs/how-to/gpu.md: after two tasks within 1e-4 of each tensor's largest number."""
    method = FedAvg(training=TRAINING)
    whole, _ = assert_resumes(lambda: federation_of(method, compiled_context(), TASKS))
    found, expected = model_of(whole), model_of(learnt(method, tiny_context(), TASKS))
    assert any(not torch.equal(value, expected[name]) for name, value in found.items())
    for name, value in found.items():
        assert float((value - expected[name]).abs().max()) <= 1e-4 * float(expected[name].abs().max()), name
