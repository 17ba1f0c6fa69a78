"""Presets: settings of a paper that go together, as choices of Hydra's group experiment/preset."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from fcl_bench.composition import combinations, composed, config_dir, register_presets
from fcl_bench.config import YAML_LOADER, load_settings
from tests.conftest import REPOSITORY

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


def test_the_three_runs_of_make_stsa_table1_compose_and_go_on(tmp_path):
    """The public code's rate; its classes and shares too; and these at E.2's rate: three runs, each with its id."""
    makefile = (REPOSITORY / "Makefile").read_text()
    rule = re.search(r"^stsa-table1:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE).group(1)
    defined = dict(re.findall(r"^(STSA_\w+) := ((?:.*\\\n)*.*)$", makefile, re.MULTILINE))
    found = []
    for line in rule.splitlines():
        for name, value in defined.items():
            line = line.replace(f"$({name})", value)
        typed = shlex.split(re.sub(r"\$\(if .*?\),data.path=.*?\)\)|\\\n", " ", line).replace("$(BIN)/fcl-bench", ""))
        settings = load_settings(composed([*typed, f"out={tmp_path}"]))
        training = settings.adapt.training
        assert (settings.backbone.model_args, settings.adapt.head) == ({"zero_init_last": False}, "cosine")
        assert (training.precision, training.augment) == ("bfloat16", "crop_flip_brightness")
        assert (settings.beta, settings.scalars.seed, settings.scalars.checkpoint_rounds) == (0.5, 0, 2)
        assert (settings.method.name, settings.method.M, settings.method.gamma) == ("stsa", 5000, 1e4)
        assert (settings.scalars.clients, settings.scalars.tasks, training.rounds, training.epochs) == (5, 10, 100, 2)
        found.append((training.lr, settings.split.order, settings.partition.name))
    published = ("published", "published")
    assert found == [(0.2, None, "dirichlet"), (0.2, *published), (0.04, *published)]


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
