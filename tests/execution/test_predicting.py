"""A saved model answers as the run that saved it, sample by sample, whatever the method."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fcl_bench
from fcl_bench.errors import UserError
from fcl_bench.execution.predicting import Model
from fcl_bench.results.verifying import verify
from tests.conftest import write_features
from tests.small_methods import NAMES, short_run, trains_by_gradient
from tests.small_runs import run_in, settings_for

SMALL = ("tasks=2", "clients=2", "device=cpu", "predictions=true")
#: Methods that train take minutes together.
EVERY = [
    pytest.param(name, marks=pytest.mark.slow) if trains_by_gradient(name) and name != "fedavg" else name
    for name in NAMES
]
#: Knobs under which a model consists of other parts.
OTHERS = {
    "a linear map of its own": ("method=stsa", "method.M=null"),
    "scaled scores": ("method=stsa", "method.M=96", "method.scale_scores=true"),
    "the nearest mean of exemplars": ("method=fedicarl", "method.classify=nme", "method.memory=20"),
    "one task's batches": ("method=fedprotip", "method.columns=8", "method.tip.route=batch", "method.tip.batch=16"),
    "heads on features": ("method=fedavg", "method.trains=features", "backbone=pixels", "method.training.rounds=2"),
    "replayed heads": ("method=fedavg", "method.ccvr=gaussian"),
    "several maps": ("method=fedklda", "method.M=32", "method.ensemble=2"),
    "published PILoRA": ("method=pilora", "method.variant=published"),
    "classes that come back": ("method=fedprotip", "method.columns=8", "split=class_overlap"),
    "an adapted network": (
        *("method=stsa", "method.M=64", "adapt=fedavg", "adapt.training.rounds=1", "backbone.precision=bfloat16"),
    ),
    "a network adapted by low-rank updates": ("method=stsa", "method.M=64", "adapt=pilora", "adapt.training.rounds=1"),
    "clipped samples": ("method=fedlda", "noise=gaussian", "noise.multiplier=0", "noise.clip=2"),
    "noisy statistics": ("method=ranpac", "noise=gaussian", "noise.epsilon=8", "noise.clip=0.5"),
    "secure sums": ("method=stsa", "method.M=64", "secure=sums", "clients=3"),
    "a tree": ("method=stsa", "method.M=64", "transport=tree", "transport.fan_in=2"),
    "an untrained network": ("method=stsa", "method.M=64", "backbone=tiny", "backbone.width=4"),
}


def agrees(out, *overrides: str) -> Model:
    """The saved model takes each test sample for what the run took it for, and so has its accuracy."""
    outcome = run_in(out, *overrides)
    test = settings_for(out, *overrides).data.load().test
    kept = pd.read_parquet(outcome.folder / "predictions.parquet")
    kept = kept[kept["after"] == kept["after"].max()].set_index("sample")
    with np.load(outcome.folder / "partition.npz") as partition:
        tasks = np.full(len(test), -1)
        for task in range(outcome.record["tasks"]):
            tasks[partition[f"test_t{task}"]] = task
    inputs = test.inputs if isinstance(test.inputs, np.ndarray) else test.inputs.pixels
    model = Model(outcome.folder / "model.safetensors", "cpu")
    said, scores = model.answers(inputs, tasks if outcome.record["protocol"] != "task-agnostic" else None)
    np.testing.assert_array_equal(said[kept.index], kept["prediction"])
    np.testing.assert_allclose(scores[kept.index], kept["score"], rtol=1e-4, atol=1e-5)
    tested = tasks >= 0
    assert 100 * (said == test.labels)[tested].sum() / tested.sum() == outcome.record["metrics"]["A_T"]
    return model


@pytest.mark.slow_cases(
    "afcl",
    "afl",
    "air",
    "centralised_softmax",
    "ds_al",
    "fedavg",
    "fedcbc",
    "fedfecam",
    "fedklda",
    "fedncm",
    "fedran",
    "ranpac",
)
@pytest.mark.parametrize("name", EVERY)
def test_every_methods_model_reaches_the_runs_own_accuracy(name, tmp_path):
    agrees(tmp_path, *short_run(name), *SMALL)


@pytest.mark.slow_cases("a tree", "an untrained network", "clipped samples", "noisy statistics", "secure sums")
@pytest.mark.slow_cases(
    "a network adapted by low-rank updates",
    "an adapted network",
    "classes that come back",
    "heads on features",
    "one task's batches",
    "published PILoRA",
    "replayed heads",
    "the nearest mean of exemplars",
)
@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_parts_do_too(name, tmp_path):
    method = OTHERS[name][0].removeprefix("method=")
    usual = [] if "backbone=pixels" in OTHERS[name] else list(short_run(method))
    if name == "a network adapted by low-rank updates":
        usual += ["backbone=tiny", "backbone.width=4", "backbone.architecture=vit", "adapt.training.epochs=1"]
    if name == "an adapted network":
        usual += ["backbone=tiny", "backbone.width=4", "adapt.training.epochs=1"]
    agrees(tmp_path, *usual, *SMALL, *OTHERS[name])


@pytest.mark.slow
def test_a_task_without_test_samples_counts_where_batches_are_of_one_task(tmp_path):
    """Later tasks were cut into other batches than in the run."""
    file = write_features(tmp_path / "features.npz", samples=1200)
    arrays = dict(np.load(file))
    tested = arrays["y_test"] != 0  # the class of the first task
    np.savez(file, **{**arrays, "x_test": arrays["x_test"][tested], "y_test": arrays["y_test"][tested]})
    batches = (
        "method=fedprotip",
        "method.trains=features",
        "method.frozen_stages=0",
        *OTHERS["one task's batches"][1:],
    )
    usual = ("method.training.rounds=2", "method.training.lr=0.01", "split.shuffle=false", "tasks=6")
    chosen = (*batches, *usual, "data=features", f"data.path={file}", "clients=2", "predictions=true")
    model = agrees(tmp_path, *chosen)
    with pytest.raises(UserError, match=r"tasks has 6, no task of this model \(0 to 5\)"):
        model.answers(arrays["x_test"][:2], [0, 6])


def test_class_names_come_with_the_model_and_the_run(tmp_path):
    """Of a folder per class; what is predicted is the label all the same."""
    rng = np.random.default_rng(0)
    for side, count in (("train", 6), ("test", 2)):
        for number, name in enumerate(("ant", "bee", "cat")):
            folder = tmp_path / "images" / side / name
            folder.mkdir(parents=True)
            for image in range(count):
                pixels = rng.integers(80 * number, 80 * number + 60, (6, 6, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{image}.png")
    usual = ("method=fedncm", "method.similarity=euclid", "tasks=1", "clients=2", "backbone=pixels", "partition=iid")
    outcome = run_in(tmp_path, *usual, "data=imagefolder", f"data.path={tmp_path / 'images'}")
    model = Model(outcome.folder / "model.safetensors", "cpu")
    assert dict(zip(model.labels.tolist(), model.class_names.tolist(), strict=True)) == {0: "ant", 1: "bee", 2: "cat"}
    names = pd.read_csv(outcome.folder / "class_accuracy.csv").columns.tolist()
    assert names == model.class_names.tolist()
    with np.load(outcome.folder / "confusion.npz") as confusion:
        assert confusion["class_names"].tolist() == names
    assert fcl_bench.load(outcome.folder).class_accuracy.columns.tolist() == model.labels.tolist()
    assert not verify(outcome.folder).wrong
    files = sorted((tmp_path / "images" / "test").rglob("*.png"))
    said = model.predict(files)
    assert 100 * (said == np.repeat([0, 1, 2], 2)).mean() == outcome.record["metrics"]["A_T"] == 100
    images = [Image.open(file) for file in files]
    np.testing.assert_array_equal(model.predict(images), said)
    stacked = np.stack([np.asarray(image) for image in images])
    for form in (stacked, stacked.transpose(0, 3, 1, 2), torch.from_numpy(stacked)):
        np.testing.assert_array_equal(model.predict(form), said)
    np.testing.assert_array_equal(model.predict(model.features(stacked)), said)


def test_a_backbone_with_other_weights_is_refused(tmp_path, monkeypatch):
    outcome = run_in(tmp_path, *short_run("stsa"), *SMALL, "backbone=tiny", "backbone.width=4")
    model = Model(outcome.folder / "model.safetensors", "cpu")
    monkeypatch.setitem(model.about, "seed", 5)
    with pytest.raises(UserError, match="has other weights than the model was made with"):
        model.predict(np.zeros((2, 8, 8), dtype=np.uint8))


@pytest.mark.slow
def test_a_trained_model_needs_no_other_weights(tmp_path, monkeypatch):
    """Also where training began with pretrained ones: the file says no source of them."""
    outcome = run_in(tmp_path, *short_run("fedavg"), *SMALL)
    said = Model(outcome.folder / "model.safetensors", "cpu")
    before = said.predict(np.zeros((2, 8, 8), dtype=np.uint8))
    monkeypatch.setitem(said.about, "seed", 5)
    monkeypatch.setattr("fcl_bench.execution.predicting.read_model", lambda *_: (said.about, said._tensors))
    np.testing.assert_array_equal(Model("", "cpu").predict(np.zeros((2, 8, 8), dtype=np.uint8)), before)


@pytest.mark.slow
def test_samples_of_one_tasks_batches_need_their_tasks(tmp_path):
    outcome = run_in(tmp_path, *short_run("fedprotip"), *SMALL, *OTHERS["one task's batches"])
    model = Model(outcome.folder / "model.safetensors", "cpu")
    for tasks in (None, [0], np.zeros((4, 1))):
        with pytest.raises(UserError, match="asked in batches of 16 samples of one task"):
            model.predict(np.zeros((4, 8, 8), dtype=np.uint8), tasks)


def test_nothing_is_predicted_of_nothing(tmp_path):
    outcome = run_in(tmp_path, *short_run("stsa"), *SMALL)
    model = Model(outcome.folder / "model.safetensors", "cpu")
    assert model.predict(np.zeros((0, 64), dtype=np.float32)).shape == (0,)
    assert model.scores(np.zeros((0, 8, 8), dtype=np.uint8)).shape == (0, 10)
