"""Every YAML choice composes, converts, and says the same as its dataclass."""

from __future__ import annotations

import dataclasses

import pytest
import yaml
from hydra import compose, initialize_config_dir

from fcl_bench.config import GROUPS, _target, config_dir, load_settings

CHOICES = sorted((file.parent.name, file.stem) for file in config_dir().glob("*/*.yaml"))


def compose_settings(*overrides: str):
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load_settings(compose("config", overrides=list(overrides)))


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_converts(group, choice):
    extra = ["backbone.name=resnet18.tv_in1k"] if choice == "timm" else []
    settings = compose_settings(f"{group}={choice}", *extra)
    assert dataclasses.is_dataclass(getattr(settings, group))


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_lists_all_knobs_at_their_defaults(group, choice):
    """The YAML is where users read the knobs; the dataclass is where code gets them."""
    node = yaml.safe_load((config_dir() / group / f"{choice}.yaml").read_text())
    if "timm" in node.get("defaults", []):
        node = {**yaml.safe_load((config_dir() / group / "timm.yaml").read_text()), **node}
    schema = _target(group, node.pop("_target_"))
    node.pop("defaults", None)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    assert list(node) == list(fields)
    if group in ("method", "split", "partition"):
        assert node == dataclasses.asdict(schema())


def test_every_folder_of_choices_is_a_group():
    assert sorted({group for group, _ in CHOICES}) == sorted(GROUPS)


@pytest.mark.parametrize(
    ("data", "backbone"),
    [
        ("digits", "pixels"),
        ("features", "identity"),
        ("cifar100", "resnet18.tv_in1k"),
        ("imagefolder", "resnet18.tv_in1k"),
    ],
)
def test_a_data_set_brings_the_backbone_that_suits_it(data, backbone):
    assert compose_settings(f"data={data}").backbone.name == backbone


def test_a_backbone_on_the_command_line_wins():
    assert compose_settings("data=cifar100", "backbone=pixels").backbone.name == "pixels"
    assert compose_settings("backbone=pixels", "data=cifar100").backbone.name == "pixels"
