"""bfloat16 on a CPU: by key, close to float32, in the record; and the line where a CPU has it in hardware."""

from __future__ import annotations

import pytest
import torch

from fcl_bench import environment
from fcl_bench.backbones.network_extractor import NetworkExtractor
from fcl_bench.backbones.tiny import Tiny
from fcl_bench.data.sources.digits import Digits
from fcl_bench.engine.remote.replies import deserialise, serialise
from fcl_bench.execution import inputs
from fcl_bench.execution.adapt import adapted_extractor
from fcl_bench.execution.inputs import tell_of_extraction, tell_of_training
from fcl_bench.execution.serve import Site
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from tests.small_runs import run_in, settings_for

CPU = torch.device("cpu")
FLAGS = "processor\t: 0\nflags\t\t: fpu avx512_bf16 {} amx_tile amx_int8\nbugs\t\t: amx_bf16_of_a_bug\n"
TRAINED = ("method=fedavg", "data=digits", "backbone=tiny", "backbone.width=8", "tasks=2", "clients=2", "beta=10")
ROUNDS = ("method.training.rounds=3", "method.training.epochs=2", "method.training.lr=0.05")


@pytest.fixture
def amx(monkeypatch):
    """A CPU that multiplies bfloat16, on which any work is long."""
    monkeypatch.setattr(environment, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(inputs, "_LONG", 1)


def test_a_cpu_tells_whether_it_multiplies_bfloat16(tmp_path):
    for flag, found in (("amx_bf16", True), ("amx_fp16", False)):
        (tmp_path / "cpuinfo").write_text(FLAGS.format(flag))
        assert environment.multiplies_bfloat16(tmp_path / "cpuinfo") is found
    assert environment.multiplies_bfloat16(tmp_path / "absent") is False


@pytest.mark.parametrize("architecture", ["conv", "vit"])
def test_features_in_bfloat16_are_those_in_float32_to_two_digits(architecture):
    """docs/reference/backbones.md: each image's features differ by at most 2 % of their length."""
    digits = Digits().load()
    both = [
        torch.cat(list(Tiny(8, architecture=architecture, precision=kind).open(digits, CPU).batches(digits.test)))
        for kind in ("float32", "bfloat16")
    ]
    assert [features.dtype for features in both] == 2 * [torch.float32]
    apart = torch.linalg.vector_norm(both[1] - both[0], dim=1) / torch.linalg.vector_norm(both[0], dim=1)
    assert 0 < float(apart.max()) < 0.02


def test_accuracy_in_bfloat16_is_that_in_float32_to_a_few_points(tmp_path):
    """docs/how-to/training.md: within five points on digits; and the record says which was which."""
    found = {}
    for kind in ("auto", "float32", "bfloat16"):
        typed = (*TRAINED, *ROUNDS, "method.loss_classes=seen", f"method.training.precision={kind}")
        record = run_in(tmp_path, *typed).record
        found[kind] = record["metrics"]["A_T"]
        wanted = "bfloat16" if kind == "bfloat16" else "float32"
        assert record["precision"] == {"method": wanted, "adapt": None, "features": None}
    assert found["auto"] == found["float32"] > 40
    assert abs(found["bfloat16"] - found["float32"]) <= 5


@pytest.mark.parametrize(("asked", "used"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_a_first_stage_and_the_features_after_it(asked, used, tmp_path, amx, caplog):
    """What the first stage trained is extracted in the precision that the backbone's key says."""
    stage = ("adapt=fedavg", "adapt.training.rounds=1", "adapt.training.epochs=1", f"adapt.training.precision={asked}")
    small = ("method=afl", *TRAINED[1:], *stage, f"backbone.precision={asked}")
    with caplog.at_level("INFO", logger="fcl_bench"):
        record = run_in(tmp_path, *small).record
    assert record["precision"] == {"method": None, "adapt": used, "features": used}
    keys = [key for key in ("adapt.training", "backbone") if f"{key}.precision=bfloat16 is another run" in caplog.text]
    assert keys == (["adapt.training", "backbone"] if used == "float32" else [])


def test_a_process_of_clients_extracts_in_the_servers_precision(tmp_path):
    stage = ("adapt=fedavg", "adapt.training.rounds=1", "adapt.training.epochs=1", "backbone.precision=bfloat16")
    settings = settings_for(tmp_path, "method=afl", *TRAINED[1:], *stage)
    site = Site(settings, "rank 1", lambda clients: range(clients.count))
    plan = site.plan
    assert plan.context.network is not None
    body = plan.context.network.build()
    trained = {f"body.{name}": value for name, value in body.state_dict().items() if value.is_floating_point()}
    assert [
        deserialise(answer).kind for answer in site.answers(deserialise(serialise("network", Message(trained))))
    ] == ["taken"]
    asked = deserialise(serialise("extract", side="test", start=0, end=9))
    [features] = (deserialise(answer).message["features"] for answer in site.answers(asked))
    server = adapted_extractor(settings.backbone, body, plan.context.network, CPU)
    assert server.identity["precision"] == "bfloat16"
    torch.testing.assert_close(features, next(iter(server.batches(plan.dealt.dataset.test))), rtol=0, atol=0)


def test_runs_without_a_network_have_no_precision(tmp_path):
    record = run_in(tmp_path, "method=afl", "data=digits", "tasks=2", "clients=2").record
    assert record["precision"] == {"method": None, "adapt": None, "features": None}


def test_long_work_in_float32_is_told_and_no_other(amx, monkeypatch, caplog):
    network = torch.nn.Linear(10, 9)  # 99 parameters
    monkeypatch.setattr(inputs, "_LONG", 99 * 3 * 2 * 5 * 0.5 * 20)

    class Choice:
        training = Training(rounds=2, epochs=5, fraction=0.5)

    def told(kind="auto", n=20, device=CPU):
        caplog.clear()
        Choice.training.precision = kind
        with caplog.at_level("INFO", logger="fcl_bench"):
            tell_of_training(Choice, "method.training", device, lambda: network, n)
        return len(caplog.records)

    assert (told(), told("float32"), told("bfloat16"), told(n=19), told(device=torch.device("cuda"))) == (1, 1, 0, 0, 0)
    with caplog.at_level("INFO", logger="fcl_bench"):
        caplog.clear()
        for kind, n in (("float32", 300), ("float32", 299), ("bfloat16", 10**6)):
            tell_of_extraction(network, kind, CPU, n)
    assert len(caplog.records) == 1
    monkeypatch.setattr(environment, "multiplies_bfloat16", lambda: False)
    assert told() == 0


def test_the_frozen_copy_of_a_trained_network_takes_a_precision():
    digits = Digits().load()
    trainable = Tiny(4).trainable(digits, 0)
    for asked, used in (("auto", "float32"), ("bfloat16", "bfloat16")):
        assert NetworkExtractor(trainable.build(), trainable, CPU, asked).identity["precision"] == used
