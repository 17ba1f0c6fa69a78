"""Presets: settings of a paper that go together, as choices of Hydra's group experiment/preset."""

from __future__ import annotations

import pytest
import yaml

from fcl_bench.composition import combinations, composed, config_dir, register_presets
from fcl_bench.config import YAML_LOADER, load_settings

FILES = sorted(config_dir().glob("experiment/settings/*.yaml"))


def test_a_preset_is_written_as_a_command_line():
    """`group: choice`, and `key: value` at any depth; a value may be a whole node."""
    settings = load_settings(composed(["+experiment/preset=[protip_tip,protip_domainnet_2]"]))
    chosen = (settings.method.name, settings.data.name, settings.backbone.name)
    assert chosen == ("fedprotip", "domainnet", "resnet18.tv_in1k")
    assert (settings.method.training.rounds, settings.method.training.epochs) == (20, 5)
    assert (settings.method.tip.references, settings.split.order[1]) == ("updated", "infograph")


def test_later_presets_win_and_what_is_typed_wins_over_all():
    first = composed(["+experiment/preset=[scratch_cifar100,clients_10]"])
    assert (first.data.name, first.clients, first.adapt.training.lr) == ("cifar100", 10, 0.04)
    assert composed(["+experiment/preset=[clients_10,scratch_cifar100]"]).clients == 5
    assert composed(["+experiment/preset=[scratch_cifar100,clients_10]", "clients=7"]).clients == 7
    batch = composed(["+experiment/preset=[protip_tip]", "method.training.batch_size=8"]).method.tip.batch
    assert batch == 8, "an interpolation is resolved at the end"


def test_the_first_stage_as_stsas_code_has_it_differs_in_the_three_rows_of_docs_adaptation():
    ours = composed(["experiment=stsa_scratch_cifar100", "beta=0.5"])
    presets = "experiment/preset=[scratch_cifar100,first_stage_published,stsa_resnet]"
    published = composed(["experiment=stsa_scratch_cifar100", presets, "beta=0.5"])
    assert (published.adapt.head, published.adapt.training.augment) == ("cosine", "crop_flip_brightness")
    assert published.backbone.model_args == {"zero_init_last": False}
    published.adapt.head, published.adapt.training.augment = ours.adapt.head, ours.adapt.training.augment
    published.backbone.model_args = {}
    assert published == ours


def test_no_two_presets_have_one_name():
    names = [name for file in FILES for name in yaml.load(file.read_text(), Loader=YAML_LOADER)]
    assert sorted(names) == sorted(register_presets()) == sorted(set(names))


@pytest.mark.parametrize("options", [(), ("-m",)])
def test_an_unknown_preset_is_told_with_its_likes(command, options, tmp_path):
    code, _, stderr = command(*options, "experiment=afl_table1", "experiment/preset=[afl_cifar1000]", f"out={tmp_path}")
    assert code == 2
    assert stderr.startswith(
        "fcl-bench: error: experiment/preset=afl_cifar1000 is not known (did you mean afl_cifar100 "
    )
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        (["seed=0,1", "beta=0.1"], [("seed=0", "beta=0.1"), ("seed=1", "beta=0.1")]),
        (["a=1,2", "b=x,y"], [("a=1", "b=x"), ("a=1", "b=y"), ("a=2", "b=x"), ("a=2", "b=y")]),
        (["seed=0,1", "beta=1", "seed=3"], [("seed=3", "beta=1")]),
        (["rank=range(1,4)", "p=[a,b],[c]"], [(f"rank={n}", f"p={p}") for n in (1, 2, 3) for p in ("[a,b]", "[c]")]),
        (["gamma=choice(1e-4)", "+new=1", "~gone"], [("gamma=0.0001", "+new=1", "~gone=null")]),
    ],
)
def test_a_sweep_is_every_combination_in_hydras_order(typed, runs):
    assert combinations(typed) == runs
