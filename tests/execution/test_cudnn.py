"""`cudnn=`: which algorithms cuDNN takes, in every block that runs a network; and what the key is part of."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fcl_bench.backbones.network_extractor import NetworkExtractor
from fcl_bench.environment import choosing_kernels, describe, exact_kernels
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network
from tests.methods.plain_training import made_tasks
from tests.methods.training_harness import federation_of, tiny_context
from tests.simulated_cuda import simulated_cuda
from tests.small_runs import run_in, settings_for

CUDA = torch.device("cuda")
#: benchmark, deterministic, allow_tf32
CHOSEN = {"deterministic": (False, True, False), "autotuned": (True, False, False)}


def flags() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32


def test_networks_run_deterministically_unless_the_key_says_otherwise():
    before = flags()
    with exact_kernels():
        assert flags() == CHOSEN["deterministic"]
    for choice, wanted in CHOSEN.items():
        with choosing_kernels(choice), exact_kernels():
            assert flags() == wanted
    assert flags() == before


@pytest.mark.slow_cases("autotuned-FedProTIP", "deterministic-FedProTIP")
@pytest.mark.parametrize("method", [FedAvg, FedProTIP])
@pytest.mark.parametrize("choice", CHOSEN)
def test_whatever_a_network_does_on_a_gpu_takes_the_algorithms_of_the_key(choice, method, monkeypatch):
    """Steps, predictions, and the inputs of layers of which FedProTIP makes its bases."""
    seen, forward = set(), torch.nn.Conv2d.forward

    def noting(self: torch.nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
        if len(images) > 1:  # one of zeros goes through to learn the order of the layers
            seen.add(flags())
        return forward(self, images)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", noting)
    context = dataclasses.replace(tiny_context(), device=CUDA, cudnn=choice)
    training = Training(rounds=1, epochs=1, batch_size=4, precision="float32")
    with simulated_cuda(), choosing_kernels(choice):
        federation_of(method(training=training), context, made_tasks([[5, 4]], classes=2)).run(lambda _: None)
    assert seen == {CHOSEN[choice]}


@pytest.mark.slow
def test_steps_on_a_gpu_take_attention_whose_gradients_add_in_one_order(monkeypatch):
    cuda = torch.backends.cuda
    seen, forward = set(), Network.forward

    def noting(self: Network, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen.add((cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()))
        return forward(self, images)

    monkeypatch.setattr(Network, "forward", noting)
    training, tasks = Training(rounds=1, epochs=1, batch_size=4, precision="float32"), made_tasks([[5, 4]], classes=2)
    for device, choice, wanted in (
        (CUDA, "deterministic", (False, False, True)),
        (CUDA, "autotuned", (True, True, True)),
        (torch.device("cpu"), "deterministic", (True, True, True)),
    ):
        seen.clear()
        context = dataclasses.replace(tiny_context(), device=device, cudnn=choice)
        with simulated_cuda(), choosing_kernels(choice):
            federation_of(FedAvg(training=training), context, tasks).run(lambda _: None)
        assert seen == {wanted}


def test_what_was_extracted_by_autotuned_algorithms_is_known_by_it():
    start = tiny_context().network
    assert start is not None
    found = {}
    with simulated_cuda():
        for choice in CHOSEN:
            with choosing_kernels(choice):
                found[choice] = NetworkExtractor(start.build(), start, CUDA, "float32").identity
                assert describe(CUDA)["cudnn"] == choice
    assert found["autotuned"] == {**found["deterministic"], "cudnn": "autotuned"}


def test_the_key_is_part_of_the_id_only_if_it_is_not_the_default(tmp_path):
    plain, tuned = (settings_for(tmp_path, *more).identity() for more in ((), ("cudnn=autotuned",)))
    assert tuned == {**plain, "cudnn": "autotuned"}
    assert settings_for(tmp_path, "cudnn=deterministic").identity() == plain


def test_on_a_cpu_the_key_changes_nothing_and_says_so(tmp_path, caplog):
    small = ("method=afl", "data=digits", "backbone=tiny", "backbone.width=4", "tasks=2", "clients=2", "device=cpu")
    plain = run_in(tmp_path, *small).record
    assert "cudnn" not in caplog.text
    tuned = run_in(tmp_path, *small, "cudnn=autotuned").record
    assert "cudnn=autotuned changes nothing here" in caplog.text
    assert tuned["metrics"] == plain["metrics"]
    assert tuned["environment"]["cudnn"] is None
