"""First-stage adaptation: FedAvg on the first task, once for all methods that want it, then frozen for good."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fcl_bench.backbones.backbone import weights_hash
from fcl_bench.config import counting
from fcl_bench.engine import loop as engine
from fcl_bench.engine.checkpoint import as_state, new_tag
from fcl_bench.engine.in_process import Here, InProcess
from fcl_bench.execution.adapt import Adapted, adapt, adaptation_identity
from fcl_bench.execution.inputs import load_images, prepare_inputs
from fcl_bench.execution.plan import Plan
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.training.network import Network
from fcl_bench.training.trainer import Trainer
from tests.execution.adaptation_runs import METHODS, SMALL, STSA, plan_of
from tests.methods.training_harness import learn_image_task
from tests.small_runs import run_in

#: Of the network that is sent: convolutions, batch norms with their statistics, a head of 4 classes.
VALUES = 9 * (3 * 4 + 4 * 8 + 8 * 16 + 16 * 32) + 4 * (4 + 8 + 16 + 32) + 4 * 33


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run of each method in one folder, the first of which adapts the network."""
    out = tmp_path_factory.mktemp("adapted")
    return out, {name: run_in(out, *SMALL, *knobs) for name, knobs in METHODS.items()}


def kept(out: Path) -> list[Path]:
    """The folders of adapted networks."""
    return [path for path in (out / "cache").glob("adapted-*") if path.is_dir()]


@pytest.fixture(scope="module")
def identity(adapted):
    return adaptation_identity(plan_of(adapted[0], *STSA))


def adapted_weights(outcome) -> str:
    return outcome.record["adaptation"]["weights"]


def by_hand(plan: Plan) -> tuple[Network, Trainer, torch.Tensor]:
    """FineTune's two halves over the first task's clients, without engine or cache; and all training images."""
    train, _ = load_images(plan)
    columns = torch.from_numpy(plan.dealt.stream.train_columns)
    clients = [(train[indices], columns[indices]) for indices in plan.dealt.shards[0]]
    method = FedAvg(training=plan.settings.adapt.training)
    server = method.server(plan.context)
    learn_image_task(method, plan.context, server, plan.dealt.stream.tasks[0], clients)
    return server.network, server.trainer, train


# What comes out -------------------------------------------------------------------------------------------------------


def test_the_features_are_those_of_the_network_that_fedavg_on_the_first_task_leaves(adapted):
    """Trained again by hand: the same weights to the bit, the same features, the same accuracy."""
    out, outcomes = adapted
    plan = plan_of(out, *STSA)
    network, trainer, images = by_hand(plan)
    body = network.body.eval()
    inputs = prepare_inputs(plan, out, Here())
    assert inputs.adapted.hit
    ours = inputs.adapted.body.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in body.state_dict().items() if value.is_floating_point())
    assert not any(parameter.requires_grad for parameter in inputs.adapted.body.parameters())
    assert not any(module.training for module in inputs.adapted.body.modules())
    with torch.no_grad():
        features = torch.cat([body(trainer.standardise(batch)) for batch in images.split(200)])
        plain = plan.context.network.build().eval()(trainer.standardise(images[:50]))
    torch.testing.assert_close(inputs.train, features, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(inputs.train[:50], plain, atol=0.01)
    _, test = load_images(plan)
    first = plan.dealt.stream.test[0]
    with torch.no_grad():
        scores = network.eval()(trainer.standardise(test[first]))
    right = (scores.argmax(dim=1).numpy() == plan.dealt.stream.test_columns[first]).mean()
    assert outcomes["stsa"].record["adaptation"]["accuracy"] == pytest.approx(100 * right, abs=0.8)
    assert 100 * right > 40
    assert scores.shape[1] == 4


def test_every_method_gets_the_same_network_and_the_same_features(adapted):
    outcomes = adapted[1]
    assert len({adapted_weights(outcome) for outcome in outcomes.values()}) == 1
    hits = {name: outcome.record["adaptation"]["cache_hit"] for name, outcome in outcomes.items()}
    assert hits == {"stsa": False, "stsa_e": True, "fedran": True}
    cached = {name: outcome.record["runtime"]["feature_cache_hit"] for name, outcome in outcomes.items()}
    assert cached == hits
    projections = [load_file(outcome.folder / "model.safetensors")["projection"] for outcome in outcomes.values()]
    assert all(projection.shape == (32, 64) for projection in projections)
    whole = [outcome.record["adaptation"] for outcome in outcomes.values()]
    assert all(
        {**other, "cache_hit": None, "seconds": None} == {**whole[0], "cache_hit": None, "seconds": None}
        for other in whole
    )


def changed_elsewhere(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """The images, those of later tasks replaced by noise."""
    train, test = (side.clone() for side in load_images(plan))
    later = np.concatenate(plan.dealt.stream.train[1:])
    train[later] = torch.randint(
        0, 256, train[later].shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    test[np.concatenate(plan.dealt.stream.test[1:])] = 255
    return train, test


def test_later_tasks_have_no_part_in_it(adapted, tmp_path):
    plan = plan_of(adapted[0], *STSA)
    ours = adapt(plan, lambda: changed_elsewhere(plan), tmp_path, Here())
    assert weights_hash(ours.body) == adapted_weights(adapted[1]["stsa"])
    assert ours.accuracy == adapted[1]["stsa"].record["adaptation"]["accuracy"]
    assert {row.task for row in ours.ledger.uploads} == {0}


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_its_bytes_are_counted_by_hand_and_apart(adapted):
    """Three rounds of three clients: the network, and 8 bytes for the number of samples."""
    for name, outcome in adapted[1].items():
        uploads = pd.read_csv(outcome.folder / "uploads.csv")
        first, rest = uploads[uploads.stage == "adaptation"], uploads[uploads.stage != "adaptation"]
        assert len(first) == 9
        assert (first.task == 0).all()
        assert first.groupby("client")["round"].apply(list).tolist() == [[0, 1, 2]] * 3
        assert (first.up_bytes == 4 * VALUES + 8).all()
        record = outcome.record["adaptation"]
        assert record["rounds"] == 3
        assert record["up_max_bytes"] == record["up_total_max_bytes"] == 3 * (4 * VALUES + 8)
        assert record["up_total_bytes"] == 9 * (4 * VALUES + 8)
        # Down: the network, the round, the step size, one number of classes.
        assert (first.down_bytes == 4 * VALUES + 8 + 8 + 4).all()
        assert record["down_total_bytes"] == first.down_bytes.sum()
        communication = outcome.record["communication"]
        assert set(communication["by_stage"]) == {"statistics"}
        assert communication["up_max_bytes"] == rest.groupby(["client", "task"]).up_bytes.sum().max()
        assert communication["up_total_bytes"] == rest.up_bytes.sum()
        assert communication["down_max_bytes"] == rest.groupby(["client", "task"]).down_bytes.sum().max()
        if name == "stsa":
            assert communication["up_max_bytes"] == 4 * 64 * (64 + 4)
        tasks = pd.read_csv(outcome.folder / "tasks.csv")
        assert tasks.up_bytes.tolist() == rest.groupby("task").up_bytes.sum().tolist()


def test_its_seconds_are_apart_too(adapted):
    first, second = (adapted[1][name].record for name in ("stsa", "fedran"))
    uploads = pd.read_csv(adapted[1]["stsa"].folder / "uploads.csv")
    own = uploads[uploads.stage == "adaptation"].client_seconds.sum()
    assert first["adaptation"]["client_seconds"] == pytest.approx(own)
    assert first["runtime"]["client_seconds"] == pytest.approx(uploads.client_seconds.sum() - own)
    assert first["adaptation"]["seconds"] > first["adaptation"]["client_seconds"]
    # What it cost when it was made stays; this run spent next to nothing on it.
    assert second["adaptation"]["client_seconds"] == first["adaptation"]["client_seconds"]
    assert second["adaptation"]["seconds"] < first["adaptation"]["seconds"]


# Kept, and found again ------------------------------------------------------------------------------------------------


def test_features_are_kept_under_the_hash_of_the_adapted_weights(adapted):
    out, outcomes = adapted
    files = list((out / "cache").glob("digits-*.safetensors"))
    assert len(files) == 2
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert json.loads(opened.metadata()["key"])["weights"] == adapted_weights(outcomes["stsa"])
    assert adapted_weights(outcomes["stsa"]) != outcomes["stsa"].record["features"]["weights"]
    assert len(kept(out)) == 1


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (("method=stsa_e", "method.dummy_clients=3", "wire.gram=packed", "wire.columns=held", "drift=3"), True),
        (("method=afl", "cache.enabled=false", "checkpoint_rounds=1"), True),
        (("dtype=float32",), False),
        (("seed=1",), False),
        (("beta=0.5",), False),
        (("clients=4",), False),
        (("tasks=2",), False),
        (("label_rate=0.5",), False),
        (("partition=iid",), False),
        (("wire.dtype=float16",), False),
        (("backbone.width=5",), False),
        (("backbone.size=9",), False),
        (("adapt.training.rounds=4",), False),
        (("adapt.training.weight_decay=0",), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_it_is_known_by(tmp_path, identity, overrides, same):
    """Everything that can change the result, and nothing that only the method looks at."""
    plan = plan_of(tmp_path, *STSA, *overrides)
    ours = adaptation_identity(plan)
    assert (ours == identity) is same
    assert ours["training"] == counting(plan.settings.adapt.training)


@pytest.mark.slow
def test_another_method_takes_it_over_and_another_setting_does_not(adapted, tmp_path, trained):
    out, outcomes = adapted
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    again = run_in(tmp_path, *SMALL, *METHODS["stsa"][:2], "method.gamma=7")
    assert not again.was_complete
    assert again.record["adaptation"]["cache_hit"]
    assert adapted_weights(again) == adapted_weights(outcomes["stsa"])
    assert trained == []
    for setting in ("beta=5", "adapt.training.weight_decay=0.01"):
        trained.clear()
        other = run_in(tmp_path, *STSA, setting)
        assert not other.record["adaptation"]["cache_hit"]
        assert adapted_weights(other) != adapted_weights(outcomes["stsa"])
        assert len(trained) == 9
        assert not other.record["runtime"]["feature_cache_hit"]


def interrupted(round_: int, monkeypatch, out: Path, *choice: str) -> None:
    """A run that is interrupted before a round of its first stage."""
    exchange = engine.Federation._round

    def stops(self, task, number, *rest):
        if number == round_:
            raise KeyboardInterrupt
        return exchange(self, task, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(engine.Federation, "_round", stops)
        with pytest.raises(KeyboardInterrupt):
            run_in(out, *choice)


@pytest.mark.slow_cases("1-false", "2-true")
@pytest.mark.parametrize(("round_", "cache"), [(1, "false"), (2, "true")])
def test_an_interrupted_adaptation_goes_on_to_the_same_bits(adapted, tmp_path, monkeypatch, trained, round_, cache):
    choice = (*STSA, "checkpoint_rounds=1", f"cache.enabled={cache}")
    interrupted(round_, monkeypatch, tmp_path, *choice)
    trained.clear()
    outcome = run_in(tmp_path, *choice)
    assert len(trained) == 3 * (3 - round_)
    whole = adapted[1]["stsa"]
    assert adapted_weights(outcome) == adapted_weights(whole)
    assert outcome.record["metrics"] == whole.record["metrics"]
    assert (outcome.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    columns = ["task", "round", "client", "stage", "up_bytes", "down_bytes"]
    pd.testing.assert_frame_equal(*(pd.read_csv(run.folder / "uploads.csv")[columns] for run in (outcome, whole)))
    ours, theirs = ({**run.record["adaptation"]} for run in (outcome, whole))
    for key in ("rounds", "accuracy", "up_max_bytes", "up_total_bytes", "down_total_bytes"):
        assert ours[key] == theirs[key]


@pytest.mark.slow
def test_without_a_cache_nothing_is_kept(adapted, tmp_path, trained):
    outcome = run_in(tmp_path, *STSA, "cache.enabled=false")
    assert adapted_weights(outcome) == adapted_weights(adapted[1]["stsa"])
    assert outcome.folder.name == adapted[1]["stsa"].folder.name
    assert outcome.record["metrics"] == adapted[1]["stsa"].record["metrics"]
    assert not (tmp_path / "cache").exists()
    assert not (outcome.folder / "checkpoint").exists()
    assert len(trained) == 9
    again = run_in(tmp_path, *STSA, "cache.enabled=false", "force=true")
    assert not again.record["adaptation"]["cache_hit"]
    assert len(trained) == 18


@pytest.mark.slow
def test_a_run_interrupted_after_its_first_stage_does_not_train_again_without_a_cache(
    adapted, tmp_path, monkeypatch, trained
):
    learn = engine.Federation._learn

    def stops(self, task):
        if task.index == 1:
            raise KeyboardInterrupt
        return learn(self, task)

    choice = (*STSA, "cache.enabled=false")
    with monkeypatch.context() as patch:
        patch.setattr(engine.Federation, "_learn", stops)
        with pytest.raises(KeyboardInterrupt):
            run_in(tmp_path, *choice)
    assert len(trained) == 9
    outcome = run_in(tmp_path, *choice)
    assert len(trained) == 9
    assert outcome.record["metrics"] == adapted[1]["stsa"].record["metrics"]
    assert not (outcome.folder / "checkpoint").exists()


@pytest.mark.slow_cases("state.json")
@pytest.mark.parametrize("victim", ["state.json", "tensors", "gone"])
def test_a_damaged_result_is_made_anew(adapted, tmp_path, trained, victim, caplog):
    [original] = kept(adapted[0])
    folder = shutil.copytree(original, tmp_path / "cache" / original.name)
    file = folder / "state.json" if victim == "state.json" else next(folder.glob("*.safetensors"))
    if victim == "gone":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))
    plan = plan_of(tmp_path, *STSA)
    again, then = (prepare_inputs(plan, tmp_path, Here()).adapted for _ in range(2))
    assert len(trained) == 9
    assert (again.hit, then.hit) == (False, True)
    assert weights_hash(again.body) == weights_hash(then.body) == adapted_weights(adapted[1]["stsa"])
    assert "is damaged" in caplog.text


@pytest.mark.slow
def test_a_complete_one_needs_nothing_that_its_clients_kept(tmp_path, monkeypatch, trained):
    """Ranks on several machines keep it on disks of their own: a later run asked for the files of all of them."""
    quick = (*SMALL, *METHODS["stsa"], "adapt.training.rounds=1")
    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "state_dict", lambda self: as_state(new_tag(0, 0)))
        run_in(tmp_path, *quick)
    trained.clear()
    assert run_in(tmp_path, *quick, "method.gamma=7").record["adaptation"]["cache_hit"]
    assert trained == []


@pytest.mark.slow
def test_two_runs_at_once_do_it_once(adapted, tmp_path, trained):
    """In two threads, each with its own method; a lock on a file keeps them apart as it does processes."""
    plans = [plan_of(tmp_path, *SMALL, *METHODS[name]) for name in ("stsa", "fedran")]
    found: dict[int, Adapted] = {}

    def work(index: int) -> None:
        found[index] = prepare_inputs(plans[index], tmp_path / str(index), Here()).adapted

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.hit for result in found.values()) == [False, True]
    assert len(trained) == 9
    assert {weights_hash(result.body) for result in found.values()} == {adapted_weights(adapted[1]["stsa"])}


@pytest.mark.slow
def test_two_processes_at_once_do_it_once(adapted, tmp_path):
    lines = [
        [sys.executable, "-m", "fcl_bench", f"out={tmp_path}", *SMALL, *METHODS[name]] for name in ("stsa", "fedran")
    ]
    # A first stage trains with the threads of its process, and sums round by their number.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    both = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) for line in lines]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    records = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/run.json")]
    assert sorted(record["adaptation"]["cache_hit"] for record in records) == [False, True]
    assert {record["adaptation"]["weights"] for record in records} == {adapted_weights(adapted[1]["stsa"])}
    assert sum("adaptation: taken over" in output for output in outputs) == 1
