"""bfloat16 on a CPU: by key, close to float32, in the record; and the line where a CPU has it in hardware."""

from __future__ import annotations

import pytest
import torch

from fcl_bench import environment
from fcl_bench.backbones.network_extractor import NetworkExtractor
from fcl_bench.backbones.tiny import Tiny
from fcl_bench.data.sources.digits import Digits
from fcl_bench.engine.remote.replies import deserialise, serialise
from fcl_bench.execution.adapt import adaptation_identity, adapted_extractor
from fcl_bench.execution.plan import make_plan
from fcl_bench.execution.serve import Site
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from tests.small_runs import run_in, settings_for

CPU = torch.device("cpu")
FLAGS = "processor\t: 0\nflags\t\t: fpu {} amx_tile amx_int8\nbugs\t\t: amx_bf16_of_a_bug\n"
TRAINED = ("method=fedavg", "data=digits", "backbone=tiny", "backbone.width=8", "tasks=2", "clients=2", "beta=10")
ON_FEATURES = "method.trains=features"
ROUNDS = ("method.training.rounds=3", "method.training.epochs=2", "method.training.lr=0.05")


@pytest.fixture
def amx(monkeypatch):
    """A CPU that multiplies bfloat16."""
    monkeypatch.setattr(environment, "multiplies_bfloat16", lambda: True)


@pytest.mark.parametrize(
    ("flag", "found"), [("amx_bf16", True), ("avx512_bf16", True), ("amx_fp16", False), ("avx512_f", False)]
)
def test_a_cpu_tells_whether_it_multiplies_bfloat16(flag, found, tmp_path, monkeypatch):
    """By torch's own account, or before it had one by Linux's; unless oneDNN may not."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    both = {"amx_bf16": False, "avx512_bf16": False, "architecture": "x86_64", flag: True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: both, raising=False)
    assert environment.multiplies_bfloat16() is found
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core_bf16")
    assert environment.multiplies_bfloat16() is found
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")
    assert environment.multiplies_bfloat16() is False
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    (tmp_path / "cpuinfo").write_text(FLAGS.format(flag))
    assert environment.multiplies_bfloat16(tmp_path / "cpuinfo") is found
    assert environment.multiplies_bfloat16(tmp_path / "absent") is False


@pytest.mark.slow
@pytest.mark.parametrize("has", [False, True])
def test_auto_decides_by_the_cpu_and_counts_in_the_run_id_where_it_decides_for_bfloat16(has, tmp_path, monkeypatch):
    def ids(precision):
        key = f"method.training.precision={precision}"
        return [make_plan(settings_for(tmp_path, *typed, key)).id for typed in (TRAINED, (*TRAINED, ON_FEATURES))]

    before = ids("auto"), ids("float32")
    monkeypatch.setattr(environment, "multiplies_bfloat16", lambda: has)
    used = "bfloat16" if has else "float32"
    assert Training().forward_precision("cpu", images=True) == used
    assert [Training().forward_precision(*where) for where in (("cuda", True), ("cuda", False))] == 2 * ["bfloat16"]
    assert Training().forward_precision("cpu", images=False) == "float32"  # linear heads gain nothing
    assert Training(precision="bfloat16").forward_precision("cpu", images=False) == "bfloat16"
    assert [one == other for one, other in zip(ids("auto"), before[0], strict=True)] == [not has, True]
    assert ids("float32") == before[1]
    record = run_in(tmp_path, *TRAINED, "method.training.rounds=1", "method.training.epochs=1").record
    assert record["precision"] == {"method": used, "adapt": None, "features": None}
    heads = run_in(tmp_path, *TRAINED, ON_FEATURES, "method.training.rounds=1", "method.training.epochs=1").record
    assert heads["precision"]["method"] == "float32"


@pytest.mark.slow_cases("vit")
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


@pytest.mark.slow
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


@pytest.mark.slow_cases("bfloat16-bfloat16")
@pytest.mark.parametrize(("asked", "features"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_a_first_stage_and_the_features_after_it(asked, features, tmp_path, amx):
    """`auto` of the first stage decides by the CPU; its features are extracted as the backbone's key says."""
    stage = ("adapt=fedavg", "adapt.training.rounds=1", "adapt.training.epochs=1", f"adapt.training.precision={asked}")
    small = ("method=afl", *TRAINED[1:], *stage, f"backbone.precision={asked}")
    record = run_in(tmp_path, *small).record
    assert record["precision"] == {"method": None, "adapt": "bfloat16", "features": features}


def test_a_first_stage_of_the_other_precision_is_not_taken_over(tmp_path, monkeypatch):
    stage = ("adapt=fedavg", "adapt.training.rounds=1", "adapt.training.epochs=1")
    plan = make_plan(settings_for(tmp_path, "method=afl", *TRAINED[1:], *stage))
    before = adaptation_identity(plan)
    monkeypatch.setattr(environment, "multiplies_bfloat16", lambda: True)
    assert adaptation_identity(plan) == {**before, "cpu_precision": "bfloat16"}


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


def test_the_frozen_copy_of_a_trained_network_takes_a_precision():
    digits = Digits().load()
    trainable = Tiny(4).trainable(digits, 0)
    for asked, used in (("auto", "float32"), ("bfloat16", "bfloat16")):
        assert NetworkExtractor(trainable.build(), trainable, CPU, asked).identity["precision"] == used
