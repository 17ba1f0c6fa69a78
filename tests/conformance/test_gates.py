"""No gate fires in a run in which the method learns, for every method of conf/method."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from fcl_bench.backbones import tiny
from fcl_bench.linalg.tensors import with_prefix
from tests.small_methods import NAMES, architecture, short_run, trains_by_gradient
from tests.small_runs import run_in

STREAM = ("data=digits", "tasks=2", "clients=2", "beta=1", "device=cpu")
#: What a small convolutional network learns two tasks of five digits with.
CONVOLUTION = (
    *("backbone.width=8", "method.training.rounds=12", "method.training.epochs=2", "method.training.batch_size=32"),
    *("method.training.lr=0.05", "method.training.momentum=0.9", "method.loss_classes=task"),
)
#: The same inside a transformer that knows digits (see `transformer`).
TRANSFORMER = (
    *("backbone.width=8", "method.training.rounds=4", "method.training.epochs=1", "method.training.batch_size=16"),
    *("method.training.lr=0.01", "method.training.augment=none"),
)
EXEMPLARS = ("method.loss_classes=seen",)
PROXY = (*EXEMPLARS, "method.training.lr=0.5", "method.training.momentum=0")
#: Beside these: what a method cannot do without, and the knobs with which it learns.
OWN = {
    "centralised": ("method.loss_classes=seen",),
    "fedicarl": EXEMPLARS,
    "glfc": PROXY,
    "lga": (*PROXY, "method.training.rounds=18"),  # its accuracy still rises after 12
    **dict.fromkeys(("feddyn", "fedntd"), ("method.training.rounds=20",)),  # as well
    "mfcl": ("method.generator.steps=60", "method.generator.lr=0.005"),  # 3 steps make images of one class
    "lorm": ("method.training.lr=0.001", "+method.training.rates.heads=0.03"),
    "fedspace": ("method.training.momentum=0", "method.training.lr=0.003"),  # of Adam
    "pilora": ("method.training.lr=0.003", "method.training.rates.heads=0.05"),
}
#: Those that take a second together.
QUICK = ("afl", "fedncm", "fedran")


def healthy_run(name: str) -> tuple[str, ...]:
    usual = TRANSFORMER if architecture(name) == "vit" else CONVOLUTION if trains_by_gradient(name) else ()
    typed = (*STREAM, *short_run(name), *usual, *OWN.get(name, ()))
    return tuple({one.partition("=")[0]: one for one in typed}.values())


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, torch.Tensor]:
    """Of the transformer, trained on all digits: prompts and low-rank updates can do little inside drawn weights."""
    trained = ("method=centralised", "data=digits", "tasks=1", "clients=1", "beta=100", "device=cpu", "backbone=tiny")
    trained += ("backbone.architecture=vit", "method.training.rounds=6", "method.training.epochs=2")
    trained += ("method.training.optimizer=adam", "method.training.lr=0.002", "method.training.weight_decay=0")
    trained += ("method.training.batch_size=32", "method.training.augment=none", "backbone.width=8")
    folder = run_in(tmp_path_factory.mktemp("transformer"), *trained).folder
    return with_prefix(load_file(folder / "model.safetensors"), "body.")


@pytest.fixture
def transformer(weights, monkeypatch) -> None:
    """In place of the small transformer of drawn weights."""
    drawn = tiny._transformer

    def pretrained(width: int, size: int) -> torch.nn.Module:
        body = drawn(width, size)
        body.load_state_dict(weights)
        return body

    monkeypatch.setattr(tiny, "_transformer", pretrained)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_a_method_that_learns_meets_no_gate(name, request, tmp_path):
    if architecture(name) == "vit":
        request.getfixturevalue("transformer")
    assert run_in(tmp_path, *healthy_run(name)).record["gates"] == []
