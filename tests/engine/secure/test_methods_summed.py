"""Every method over secure sums: the run is the plain one to the step, or it is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.feddisco import FedDisco
from fcl_bench.methods.averaging.feddyn import FedDyn
from fcl_bench.methods.averaging.fedewc import FedEWC
from fcl_bench.methods.averaging.fedspace import FedSpace
from fcl_bench.methods.averaging.scaffold import Scaffold
from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.air import AIR
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from fcl_bench.methods.closed_form.centralised_softmax import CentralisedSoftmax
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.ds_al import DSAL
from fcl_bench.methods.closed_form.fedfecam import FedFeCAM
from fcl_bench.methods.closed_form.fedklda import FedKLDA
from fcl_bench.methods.closed_form.fedlda import FedLDA
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.gaussian_sketch import GaussianSketch
from fcl_bench.methods.closed_form.ranpac import RanPAC
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.methods.data_free.fedgen import FedGen
from fcl_bench.methods.exemplars.fedicarl import FediCaRL
from fcl_bench.methods.exemplars.glfc import GLFC
from fcl_bench.methods.projection.fot import FOT
from fcl_bench.methods.transformers.lorm import LoRM
from fcl_bench.methods.transformers.pilora import PILoRA
from fcl_bench.methods.transformers.regmean import RegMean
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.training.knobs import Gaussian, Training
from tests.engine.secure.summing import SIZES, federation
from tests.methods.harness import context_of
from tests.methods.training_harness import tiny_context
from tests.small_methods import NAMES, architecture, class_of, made, trains_by_gradient, unlisted

SECURE = SecureSums(fraction_bits=32)
SHORT = Training(rounds=2, epochs=1, batch_size=8, lr=0.05, augment="none")
ALIKE = Training(rounds=2, epochs=1, batch_size=8, lr=0.05, augment="none", weighting="uniform")

CLOSED = {
    "stsa": STSA(M=8),
    "stsa without random features": STSA(M=None, gamma="gcv"),
    "afl": AFL(),
    "afl gcv": AFL(M=8, ridge="gcv"),
    "afcl": AFCL(),
    "air": AIR(M=8),
    "air logits": AIR(M=8, correction="logits"),
    "ds_al": DSAL(M=8),
    "ranpac": RanPAC(M=8),
    "ranpac held out": RanPAC(M=8, ridge="held_out"),
    "fedncm": FedNCM(),
    "fedlda": FedLDA(),
    "fedklda": FedKLDA(M=8, ensemble=2),
    "fedfecam": FedFeCAM(),
    "fedfecam, power 1": FedFeCAM(tukey=1.0),
}
ON_FEATURES = {
    "fedavg": FedAvg(trains="features", training=SHORT),
    "fedavg uniform": FedAvg(trains="features", training=ALIKE),
    "gaussian heads": FedAvg(trains="features", training=SHORT, ccvr="gaussian"),
    "gaussian heads, variances": FedAvg(
        trains="features", training=SHORT, ccvr="gaussian", gaussian=Gaussian(covariance="diagonal")
    ),
    "scaffold": Scaffold(trains="features", training=ALIKE),
    "scaffold by samples": Scaffold(trains="features", training=SHORT),
    "feddyn": FedDyn(trains="features", training=ALIKE),
    "fedspace": FedSpace(trains="features", training=SHORT),
    "fedewc": FedEWC(trains="features", training=SHORT),
    "fedicarl": FediCaRL(trains="features", training=SHORT, memory=4, classify="softmax"),
    "fot": FOT(trains="features", training=SHORT, frozen_stages=0, projected_heads=True, columns=8),
    "fot of all inputs": FOT(
        trains="features",
        training=SHORT,
        frozen_stages=0,
        projected_heads=True,
        columns=None,
        share_of="inputs",
    ),
    "glfc": GLFC(trains="features", training=SHORT, memory=4, proxy="none"),
    "feddisco without weights": FedDisco(trains="features", training=SHORT, a=0.0, b=0.0),
    "fedgen without a generator": FedGen(trains="features", training=SHORT, alpha=0.0, beta=0.0),
}
ADDED_UP = {**CLOSED, **ON_FEATURES}
#: What has no summand, and a word of the line.
REFUSED = {
    "fedran": (FedRAN(M=8, rank=4), "fedran"),
    "centred_sketch": (CentredSketch(M=8, rank=4), "centred_sketch"),
    "gaussian_sketch": (GaussianSketch(M=8, rank=4, class_rank=2), "gaussian_sketch"),
    "stsa_e": (STSAE(M=8, dummy_clients=2), "method=stsa"),
    "centralised_ridge": (CentralisedRidge(M=8), "centralised_ridge"),
    "centralised_softmax": (CentralisedSoftmax(), "centralised_softmax"),
    "afl recursive": (AFL(aggregation="recursive"), "method.aggregation=sum"),
    "median": (FedAvg(training=Training(aggregate="median")), "method.training.aggregate=mean"),
    "feddyn by samples": (FedDyn(training=SHORT), "method.training.weighting=uniform"),
    "feddisco": (FedDisco(training=SHORT), "method.a=0"),
    "fedgen": (FedGen(training=SHORT), "method.alpha=0"),
    "fedicarl nme": (FediCaRL(training=SHORT, classify="nme"), "method.classify=softmax"),
    "lorm": (LoRM(training=SHORT), "method.merge=average"),
    "pilora": (PILoRA(training=SHORT), "method.reweighting=none"),
    "regmean": (RegMean(training=SHORT), "method=fedavg"),
    "glfc": (GLFC(training=SHORT), "method.proxy=none"),
    **{name: (made(name), name) for name in ("fedprotip", "centralised", "fedcbc")},
    "lga": (made("lga"), "method.proxy=none"),
}
NAMED = {method.name for method in (*ADDED_UP.values(), *(method for method, _ in REFUSED.values()))}
#: The other methods of conf/method: their networks train on images, which takes a while.
ON_IMAGES = {method.name: method for method in unlisted(NAMED)}
ON_IMAGES |= {name: made(name, training=SHORT, **{knob: value}) for name, knob, value in (
    ("lorm", "merge", "average"), ("pilora", "reweighting", "none")
)}  # fmt: skip


def context_for(method):
    context = tiny_context(architecture=architecture(method.name)) if method.trains_network else context_of(6)
    return replace(context, sums=True)


def numbers_of(name: str, value: torch.Tensor) -> torch.Tensor:
    """A tensor of a state; of what is saved as JSON (see `protocol.state`), its numbers."""
    if not name.endswith("!"):
        return value
    found = np.array(json.loads(bytes(value.tolist())), dtype=object).ravel()
    return torch.tensor([float(number) for number in found if isinstance(number, int | float)], dtype=torch.float64)


def assert_as_plain(method, tolerance: float, sizes: list[list[int]] = SIZES) -> None:
    """All that the servers keep is the same, to `tolerance` of the largest entry of each tensor."""
    ends = []
    for secure in (None, SECURE):
        run = federation(method, secure, sizes=sizes)
        run.run(lambda _: None)
        ends.append(run.server.state_dict())
    plain, summed = ({name: numbers_of(name, value) for name, value in state.items()} for state in ends)
    assert plain.keys() == summed.keys()
    for name, value in plain.items():
        assert value.shape == summed[name].shape, name
        if value.numel():
            room = tolerance * max(1.0, float(value.double().abs().nan_to_num().max()))
            assert torch.allclose(summed[name].double(), value.double(), rtol=0, atol=room, equal_nan=True), name


@pytest.mark.parametrize("method", CLOSED.values(), ids=CLOSED.keys())
def test_a_closed_form_method_ends_as_in_the_plain_run(method):
    assert_as_plain(method, 1e-6)


@pytest.mark.slow_cases(
    "feddyn",
    "fedewc",
    "fedicarl",
    "fot",
    "fot of all inputs",
    "gaussian heads",
    "gaussian heads, variances",
    "glfc",
    "scaffold",
    "scaffold by samples",
)
@pytest.mark.parametrize("method", ON_FEATURES.values(), ids=ON_FEATURES.keys())
def test_a_method_that_trains_ends_as_in_the_plain_run(method):
    """Models are averaged in float64 and kept in float32, of which a step changes the last bit now and then."""
    assert_as_plain(method, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ON_IMAGES.values(), ids=ON_IMAGES.keys())
def test_a_network_that_trains_ends_as_in_the_plain_run(method):
    """TARGET's images of a second task are of a generator whose training enlarges any difference."""
    assert_as_plain(method, 1e-2, SIZES[:1] if method.name == "target" else SIZES)


@pytest.mark.parametrize(("method", "word"), REFUSED.values(), ids=REFUSED.keys())
def test_a_method_whose_server_needs_each_upload_is_refused(method, word):
    with pytest.raises(UserError, match=f"secure=sums: .*{word}"):
        SECURE.check(method, context_for(method), 4, drops=False)


def test_every_method_is_added_up_or_refused():
    assert set(NAMES) == NAMED | ON_IMAGES.keys()
    assert all(trains_by_gradient(name) or class_of(name).name in NAMED for name in NAMES)
