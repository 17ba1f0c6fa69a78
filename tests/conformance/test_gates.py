"""No gate fires in a run in which the method learns, for every method of conf/method."""

from __future__ import annotations

import pytest

from tests.small_methods import NAMES, architecture, short_run, trains_by_gradient
from tests.small_runs import run_in

STREAM = ("data=digits", "tasks=2", "clients=2", "beta=1", "device=cpu")
#: What a small convolutional network learns two tasks of five digits with.
CONVOLUTION = (
    *("backbone.width=8", "method.training.rounds=12", "method.training.epochs=2", "method.training.batch_size=32"),
    *("method.training.lr=0.05", "method.training.momentum=0.9", "method.loss_classes=task"),
)
#: The same inside a transformer of drawn weights, which can learn little there.
TRANSFORMER = (
    *("backbone.width=8", "method.training.rounds=6", "method.training.epochs=1", "method.training.batch_size=16"),
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
    "feddyn": ("method.training.rounds=20",),  # as well
    "fedewc": ("method.fisher_max=null", "method.strength=1"),  # the usual bound holds most of F
    "mfcl": ("method.generator.steps=60", "method.generator.lr=0.005"),  # 3 steps make images of one class
    "lorm": ("method.training.rounds=10", "method.training.lr=0.001"),
    "pilora": ("method.training.rounds=12", "method.training.lr=0.003", "method.training.rates.heads=0.05"),
}
#: Those that take a second together.
QUICK = ("afl", "fedncm", "fedran")


def healthy_run(name: str) -> tuple[str, ...]:
    usual = TRANSFORMER if architecture(name) == "vit" else CONVOLUTION if trains_by_gradient(name) else ()
    typed = (*STREAM, *short_run(name), *usual, *OWN.get(name, ()))
    return tuple({one.partition("=")[0]: one for one in typed}.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_a_method_that_learns_meets_no_gate(name, tmp_path):
    assert run_in(tmp_path, *healthy_run(name)).record["gates"] == []
