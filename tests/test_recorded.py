"""The configuration of runs that are older than some keys of today."""

from __future__ import annotations

import copy

import pytest
import yaml

from fcl_bench.config import load_settings
from fcl_bench.recorded import resolved_config
from tests.small_runs import settings_for


@pytest.fixture
def settings(tmp_path):
    return settings_for(tmp_path, "method=fedavg", "backbone=tiny", "adapt=fedavg")


def read_back(folder, config):
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return resolved_config(folder / "config.yaml")


#: Knobs that are marked as added, by their group: of the class, of the one it inherits from, of a dataclass in it.
ADDED = {
    "split": ["imbalance"],
    "wire": ["factors"],
    "method.training": ["aggregate", "trimmed", "byzantine"],
    "adapt.training": ["aggregate", "trimmed", "byzantine"],
}


def test_what_is_newer_than_a_run_is_as_it_was_before(tmp_path, settings):
    old = copy.deepcopy(settings.resolved)
    del old["faults"], old["noise"], old["secure"], old["on_bad_upload"], old["transport"]
    for path, knobs in ADDED.items():
        node = old
        for part in path.split("."):
            node = node[part]
        for knob in knobs:
            node.pop(knob, None)
    found = read_back(tmp_path, old)
    assert found["faults"] == settings.resolved["faults"]
    assert found["transport"] == settings.resolved["transport"]
    assert found["secure"] == settings.resolved["secure"]
    assert found["noise"] == settings.resolved["noise"]
    assert found["split"]["imbalance"] == 1
    assert found["wire"] == settings.resolved["wire"]
    for group in ("method", "adapt"):
        training = found[group]["training"]
        assert [training[knob] for knob in ADDED["method.training"]] == ["mean", 0.1, 1]
        assert list(training)[-3:] == ADDED["method.training"], "behind what the file has, whose order tables keep"
    from omegaconf import OmegaConf

    assert load_settings(OmegaConf.create(found)).identity() == settings.identity()


def test_what_a_run_has_stays(tmp_path, settings):
    new = copy.deepcopy(settings.resolved)
    new["method"]["training"] |= {"aggregate": "median", "trimmed": 0.2}
    new["faults"] = {"_target_": "fcl_bench.options.faults.random.RandomFaults", "silent": 0.5}
    new["wire"]["factors"] = "int8"
    new["split"]["imbalance"] = 0.5
    new["method"]["head"] = None
    found = read_back(tmp_path, new)
    for path in ("method", "faults", "wire", "split", "adapt"):
        assert {**found[path], **new[path]} == found[path]


def test_a_class_of_a_package_that_was_renamed_is_found(tmp_path, settings):
    assert settings.resolved["adapt"]["_target_"] == "fcl_bench.execution.adapt.FedAvgAdaptation"
    old = copy.deepcopy(settings.resolved)
    old["adapt"]["_target_"] = "fcl_bench.runs.adapt.FedAvgAdaptation"
    del old["adapt"]["training"]["aggregate"]
    assert read_back(tmp_path, old)["adapt"] == settings.resolved["adapt"]


@pytest.mark.parametrize("target", ["nowhere.Gone", "fcl_bench.gone.Gone", "fcl_bench.protocol.task.Task", None])
def test_of_a_class_that_is_here_no_more_nothing_is_said(tmp_path, target):
    method = {"_target_": target, "rank": 8, "training": {"lr": 1}}
    found = read_back(tmp_path, {"method": method, "adapt": "none"})
    assert (found["method"], found["adapt"]) == (method, "none")
    assert "wire" not in found
