"""First stages by methods that put a part of their own into a frozen ViT: what they leave, cost and are known by."""

from __future__ import annotations

import re

import pandas as pd
import pytest
import torch

from fcl_bench import environment
from fcl_bench.backbones.backbone import weights_hash
from fcl_bench.config import counting
from fcl_bench.engine import loop as engine
from fcl_bench.engine.in_process import Here
from fcl_bench.execution.adapt import adaptation_identity
from fcl_bench.execution.inputs import load_images, prepare_inputs
from fcl_bench.methods.transformers.low_rank import LowRank
from fcl_bench.methods.transformers.prompts import PromptedViT
from tests.execution.adaptation_runs import METHODS, plan_of
from tests.execution.adaptation_runs import STSA as FEDAVG
from tests.methods.training_harness import learn_image_task
from tests.small_runs import run_in, settings_for

BASE = (
    *("data=digits", "backbone=tiny", "backbone.width=1", "backbone.architecture=vit", "tasks=5", "clients=2"),
    *METHODS["stsa"],
)
_TRAINING = ("adapt.training.rounds=2", "adapt.training.epochs=1", "adapt.training.lr=0.05")
STAGES = {
    "pilora": ("adapt=pilora", *_TRAINING, "adapt.rank=2"),
    "cprompt": ("adapt=cprompt", *_TRAINING, "adapt.layers=[0,1]", "adapt.components=2", "adapt.length=4"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each, in one folder."""
    out = tmp_path_factory.mktemp("stages")
    return out, {name: run_in(out, *BASE, *knobs) for name, knobs in STAGES.items()}


@pytest.mark.slow_cases("cprompt")
@pytest.mark.parametrize("name", STAGES)
def test_the_features_are_those_of_the_body_that_the_methods_first_task_leaves(runs, name):
    """Trained again by hand, by the method itself; its part is in the features, and the network is as it came."""
    plan = plan_of(runs[0], *BASE, *STAGES[name])
    images, _ = load_images(plan)
    columns = torch.from_numpy(plan.dealt.stream.train_columns)
    clients = [(images[indices], columns[indices]) for indices in plan.dealt.shards[0]]
    method = settings_for(runs[0], "backbone=tiny", f"method={name}").method
    for knob in (
        "training",
        *(field for field in ("rank", "layers", "components", "length") if hasattr(method, field)),
    ):
        setattr(method, knob, getattr(plan.settings.adapt, knob))
    server = method.server(plan.context)
    learn_image_task(method, plan.context, server, plan.dealt.stream.tasks[0], clients)
    inputs = prepare_inputs(plan, runs[0], Here())
    ours, theirs = inputs.adapted.body.state_dict(), server.network.body.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    torch.testing.assert_close(inputs.train, server.embed(images), rtol=1e-4, atol=1e-5)
    plain = plan.context.network.build().eval()(server.trainer.standardise(images[:20]))
    assert not torch.allclose(inputs.train[:20], plain, atol=1e-4)
    frozen = {key.replace(".linear", "").replace(".attention", "").removeprefix("vit."): v for key, v in ours.items()}
    assert all(torch.equal(frozen[key], v) for key, v in plan.context.network.build().state_dict().items())
    assert not any(parameter.requires_grad for parameter in inputs.adapted.body.parameters())
    assert runs[1][name].record["adaptation"]["weights"] == weights_hash(inputs.adapted.body)


def test_each_leaves_its_own_kind_of_body(runs):
    bodies = {
        name: prepare_inputs(plan_of(runs[0], *BASE, *knobs), runs[0], Here()).adapted for name, knobs in STAGES.items()
    }
    assert all(adapted.hit for adapted in bodies.values())
    [layer] = [module for module in bodies["pilora"].body.modules() if isinstance(module, LowRank)]
    assert layer.tasks == 1
    assert all(bool(factor.any()) for factor in layer.B.values())
    assert isinstance(bodies["cprompt"].body, PromptedViT)
    assert bodies["cprompt"].body.prompts.tasks == 1


def test_bytes_are_those_of_the_methods_rounds(runs):
    d, rank = 8, 2
    plan = plan_of(runs[0], *BASE, *STAGES["pilora"])
    c = len(plan.dealt.stream.tasks[0].columns)
    part = 4 * (4 * rank * d + c * d)
    uploads = pd.read_csv(runs[1]["pilora"].folder / "uploads.csv")
    own = uploads[(uploads.stage == "adaptation") & (uploads.up_bytes > 0)]
    assert set(own.task) == {0}
    assert set(own.up_bytes) == {part + 4 * c * d + c + 8}
    assert set(own.down_bytes) == {part + 8 + 8 + 4}
    assert runs[1]["pilora"].record["adapt"] == "pilora"
    assert runs[1]["pilora"].record["adaptation"]["rounds"] == 2


@pytest.mark.slow_cases("cprompt", "pilora")
@pytest.mark.parametrize("name", STAGES)
def test_another_method_takes_it_over_and_another_knob_does_not(runs, name, trained):
    out, outcomes = runs
    again = run_in(out, *BASE, *STAGES[name], "method.gamma=7")
    assert again.record["adaptation"]["cache_hit"]
    assert again.record["adaptation"]["weights"] == outcomes[name].record["adaptation"]["weights"]
    assert trained == []
    known = adaptation_identity(plan_of(out, *BASE, *STAGES[name]))
    others = {
        "pilora": ("adapt.rank=3", "adapt.pull=1", "adapt.reweighting=none", "adapt.training.lr=0.1", "seed=1"),
        "cprompt": ("adapt.components=3", "adapt.strength=0", "adapt.variant=published", "adapt.training.rounds=3"),
    }
    for other in others[name]:
        more = ("adapt.orthogonality=0",) if "published" in other else ()
        assert adaptation_identity(plan_of(out, *BASE, *STAGES[name], other, *more)) != known


@pytest.mark.parametrize(
    ("name", "other", "same"),
    [
        ("pilora", "adapt.reweighting=distances", False),
        ("pilora", "adapt.reweighting=none", True),
        ("cprompt", "seed=0", True),
    ],
)
def test_the_form_of_columns_counts_where_columns_are_sent(tmp_path, name, other, same):
    """A stage was taken over whose bytes were those of the other form, so what a run recorded depended on `out`."""
    choice = (*BASE, *STAGES[name], other)
    found = [adaptation_identity(plan_of(tmp_path, *choice, f"wire.columns={form}")) for form in ("task", "held")]
    assert (found[0] == found[1]) is same
    assert "wire_columns" not in found[0]


@pytest.mark.slow
def test_an_interrupted_first_stage_goes_on_to_the_same_bits(runs, tmp_path, monkeypatch, trained):
    exchange = engine.Federation._round

    def stops(self, task, number, *rest):
        if number == 1:
            raise KeyboardInterrupt
        return exchange(self, task, number, *rest)

    choice = (*BASE, *STAGES["pilora"], "checkpoint_rounds=1")
    with monkeypatch.context() as patch:
        patch.setattr(engine.Federation, "_round", stops)
        with pytest.raises(KeyboardInterrupt):
            run_in(tmp_path, *choice)
    before = len(trained)
    outcome, whole = run_in(tmp_path, *choice), runs[1]["pilora"]
    assert len(trained) == 2 * before
    assert outcome.record["adaptation"]["weights"] == whole.record["adaptation"]["weights"]
    assert outcome.record["metrics"] == whole.record["metrics"]


def test_what_fedavg_left_is_still_known_by_the_same_name(tmp_path):
    """Its training and fedavg's revision."""
    plan = plan_of(tmp_path, *FEDAVG)
    whole, training = plan.settings.identity(), counting(plan.settings.adapt.training)
    kept = (
        "seed",
        "beta",
        "clients",
        "tasks",
        "label_rate",
        "dtype",
        "data",
        "split",
        "partition",
        "on_bad_upload",
        "cudnn",
    )
    assert adaptation_identity(plan) == {
        **{key: whole[key] for key in kept},
        "wire_dtype": str(plan.context.wire.dtype),
        "revision": 1,
        "head": "linear",
        "training": training,
        "network": plan.identity,
        "data_fingerprint": plan.dealt.dataset.fingerprint,
        "device": environment.device_kind(plan.context.device),
    }
    assert whole["adapt"] == {"choice": "fedavg", "revision": 1, "head": "linear", "training": training}


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        (("adapt=pilora", "adapt.layers=[9]"), r"adapt\.layers=\[9\] for a network of 4 blocks"),
        (("adapt=pilora", "adapt.targets=[w]"), r"adapt\.targets=\['w'\]"),
        (("adapt=pilora", "backbone.architecture=conv"), "adapt=pilora works inside a vision transformer"),
        (("adapt=pilora", "adapt.training.schedule=step"), r"adapt\.training\.schedule=step has no milestones"),
        (("adapt=pilora", "adapt.variant=published"), r"unknown key adapt\.variant"),
        (("adapt=pilora", "method=fedavg"), "adapt=pilora: method=fedavg trains the network itself"),
        (("adapt=cprompt", "adapt.length=3", "adapt.layers=[0]"), r"adapt\.length=3 .*\(adapt\.length=4\)"),
        (("adapt=cprompt",), r"adapt\.layers=\[0, 1, 2, 3, 4\] for a network of 4 blocks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_knobs_are_named_at_adapt(command, tmp_path, knobs, told):
    base = [choice for choice in BASE if not any(choice.split("=")[0] == knob.split("=")[0] for knob in knobs)]
    if "method=fedavg" in knobs:
        base = [choice for choice in base if not choice.startswith("method")]
    code, _, err = command(*base, *knobs, f"out={tmp_path}")
    assert code == 2
    [line] = err.splitlines()
    assert re.search(told, line), line
