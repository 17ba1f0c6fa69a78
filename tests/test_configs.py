"""Every YAML choice composes, converts, and says the same as its dataclass."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from fcl_bench.cli.knobs import read_choice
from fcl_bench.composition import composed, config_dir
from fcl_bench.config import GROUPS, load_settings, target_class
from fcl_bench.errors import UserError
from tests.small_methods import ALIASES, NAMES, architecture

#: Tested elsewhere: `logger` in tests/tracking, `track` in test_tracks.py, experiments and profiles here and in
#: tests/papers.
CHOICES = sorted(
    (file.parent.name, file.stem)
    for file in config_dir().glob("*/[!_]*.yaml")
    if file.parent.name not in ("experiment", "profile", "track", "logger")
)


@functools.cache
def compose_settings(*overrides: str):
    return load_settings(composed(overrides))


def of_choice(group: str, choice: str):
    """The choice in a configuration of one of each group, since composing takes a tenth of a second."""
    own = [name for of, name in CHOICES if of == group]
    at = own.index(choice)
    row = [(of, [name for of_, name in CHOICES if of_ == of]) for of in GROUPS]
    chosen = {of: names[at] for of, names in row if at < len(names)}
    extra = ["backbone.name=resnet18.tv_in1k"] if chosen.get("backbone") == "timm" else []
    return compose_settings(*(f"{of}={name}" for of, name in chosen.items()), *extra)


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_converts(group, choice):
    assert dataclasses.is_dataclass(getattr(of_choice(group, choice), group))


def node_of(group: str, choice: str) -> dict[str, Any]:
    """A choice's YAML over what it takes over from others of its group."""
    node = yaml.safe_load((config_dir() / group / f"{choice}.yaml").read_text())
    shared = [name for name in node.get("defaults", []) if isinstance(name, str) and name != "_self_"]
    parts = [OmegaConf.create(node_of(group, name)) for name in shared]
    return OmegaConf.to_container(OmegaConf.merge(*parts, OmegaConf.create(node)))


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_lists_all_knobs_at_their_defaults(group, choice):
    """The YAML is where users read the knobs; the dataclass is where code gets them. An alias has other defaults."""
    node = node_of(group, choice)
    if "variant" in node and "${variant" in str(node):
        node = OmegaConf.to_container(OmegaConf.create(node), resolve=True)
    schema = target_class(group, node.pop("_target_"))
    node.pop("defaults", None)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    assert sorted(node) == sorted(fields)
    if group in ("method", "split", "partition") and not (group == "method" and choice in ALIASES):
        taken_over = {key: node[key] for key in node if str(node[key]).startswith("${")}  # of the top-level key
        assert taken_over in ({}, {"beta": "${beta}"})
        assert node == dataclasses.asdict(schema(**taken_over))


def texts_of(schema: type, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each key of a class, those of its parts too, that takes some texts only, and these texts."""
    types = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        key = prefix + field.name
        for part in (types[field.name], *typing.get_args(types[field.name])):
            if dataclasses.is_dataclass(part):
                yield from texts_of(part, f"{key}.")
        if texts := tuple(field.metadata.get("choices", ())):
            yield key, texts


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_a_keys_comment_names_all_of_its_values(group, choice):
    """`fcl-bench show` prints the comment. It may say instead that a method leaves no choice."""
    target = yaml.safe_load((config_dir() / group / f"{choice}.yaml").read_text()).get("_target_")
    knobs = read_choice(group, choice).knobs
    for key, texts in texts_of(target_class(group, target)) if target else ():
        said = f"{knobs[key].default} {knobs[key].comment}" if key in knobs else ""
        if said and not re.search(r"only|alone|no other|no choice|has to be|refused", said):
            assert set(texts) <= set(re.findall(r"[\w-]+", said)), key


@pytest.mark.parametrize("group", GROUPS)
def test_classes_of_a_group_have_names_of_their_own_in_a_runs_identity(group):
    """Whatever module they are in."""
    named: dict[str, type] = {}
    for choice in [choice for of, choice in CHOICES if of == group]:
        settings = of_choice(group, choice)
        # A transport has no part in it, or its knobs.
        name = settings.identity().get(group, {}).get("choice", choice)
        found = type(getattr(settings, group))
        assert named.setdefault(name, found) is found
        assert "." not in name


@pytest.mark.parametrize("method", ["fedavg", "fot", "fedprotip", "centralised"])
def test_the_gradient_methods_share_an_experiment(method):
    settings = compose_settings("experiment=training_pretrained_cifar100", f"method={method}")
    assert (settings.method.name, settings.method.training.rounds) == (method, 50)


def test_the_papers_settings_are_the_experiments():
    stsa = compose_settings("experiment=stsa_scratch_cifar100")
    assert (stsa.method.M, stsa.method.gamma, stsa.backbone.stem) == (5000, 1e4, "cifar")
    training = stsa.adapt.training
    assert (training.rounds, training.epochs, training.batch_size, training.lr) == (100, 2, 128, 0.04)
    assert (training.momentum, training.weight_decay, training.schedule) == (0.9, 5e-4, "cosine")
    scratch = compose_settings("experiment=fedprotip_scratch_cifar100").method
    assert (scratch.threshold, scratch.tip.route, scratch.columns, scratch.frozen_stages) == (0.95, "batch", 512, 0)


def test_every_folder_of_choices_is_a_group():
    assert sorted({group for group, _ in CHOICES}) == sorted(GROUPS)


def test_beta_is_the_partitions_wherever_it_is_set():
    """At the top for all Dirichlet rules, and in a run's identity at the top alone."""
    settings = compose_settings("beta=0.5")
    assert (settings.beta, settings.partition.beta, settings.identity()["beta"]) == (0.5, 0.5, 0.5)
    assert "beta" not in settings.identity()["partition"]
    assert compose_settings("partition=iid", "beta=0.5").beta is None
    assert compose_settings("partition.beta=0.7").identity() == compose_settings("beta=0.7").identity()
    for key in ("beta", "partition.beta"):
        with pytest.raises(UserError, match=rf"^{key}=-1\.0 is out of range \(a finite number, 1e-06 or more\)$"):
            compose_settings(f"{key}=-1")


def test_a_knob_at_its_neutral_value_is_not_part_of_the_identity():
    plain, more = (
        compose_settings("method=gaussian_sketch", f"method.softmax_steps={steps}").identity()["method"]
        for steps in (0, 3)
    )
    assert more == {**plain, "softmax_steps": 3}
    assert "softmax_steps" not in plain


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


#: What the miniature trains inside a transformer: `tiny` is then one.
TRANSFORMERS = [f"method={name}" for name in NAMES if architecture(name) == "vit"]
TRANSFORMERS += ["adapt=pilora", "adapt=cprompt"]


@pytest.mark.parametrize("choice", TRANSFORMERS)
def test_the_miniature_brings_a_transformer_and_leaves_another_backbone_alone(choice):
    beside = [choice] if choice.startswith("method=") else [choice, "method=stsa"]
    assert compose_settings("profile=quick", *beside).backbone.architecture == "vit"
    other = compose_settings("profile=quick", *beside, "backbone=vit_32")
    assert type(other.backbone).__name__ == "Timm"


def test_the_miniature_sets_keys_of_a_backbone_only_where_it_is_chosen():
    """Otherwise another backbone ends with an unknown key that nobody typed."""
    for file in config_dir().glob("profile/*/quick/**/*.yaml"):
        at = file.relative_to(config_dir() / "profile").parts
        if "backbone" in yaml.safe_load(file.read_text()):
            assert at[0] == "backbone" or at[2] == "tiny", file


def test_runs_in_miniature_have_a_folder_of_their_own_unless_one_is_typed():
    assert compose_settings().scalars.out == "outputs"
    quick = compose_settings("profile=quick").scalars
    assert (quick.out, quick.cache.dir) == ("outputs/quick", "outputs/quick/cache")
    assert compose_settings("profile=quick", "out=elsewhere").scalars.out == "elsewhere"
