"""Every knob of a method is read in a run, or says with which other value it would be."""

from __future__ import annotations

import dataclasses

import pytest

from fcl_bench.execution.run import run
from tests.read_keys import keys_of, parts_of, recorded
from tests.small_methods import NAMES, short_run, trains_by_gradient
from tests.small_runs import settings_for

#: Knobs that a class has from its base and refuses in any other value, and one that a documented sweep sets for all.
_REFUSED = {
    f"method.{key}" for key in ("loss_classes", *(f"training.{own}" for own in ("weighting", "aggregate", "trimmed")))
}
#: What a preset sets beside any other value, so that it is no error.
_PRESET = {"method.tip.batch"}


def declared(settings) -> set[str]:
    """The keys of knobs that say with what they are read, those of a part as a whole too."""
    found = set()
    for key, part in parts_of(settings).items():
        holder, _, name = key.rpartition(".")
        whole = parts_of(settings).get(holder)
        own = [] if whole is None else [field for field in dataclasses.fields(whole) if field.name == name]
        of_part = any(field.metadata.get("of") for field in own)
        found |= {f"{key}.{one.name}" for one in dataclasses.fields(part) if one.metadata.get("of") or of_part}
    return found


def unread(tmp_path, *overrides) -> tuple[set[str], set[str]]:
    """The keys below `method` that a run does not read, and those that say with what they are read."""
    settings = settings_for(tmp_path, *overrides, "data=digits", "tasks=2", "clients=3", "cache.enabled=false")
    with recorded(settings) as seen:
        run(settings)
    left = {key for key, own in keys_of(settings).items() if own not in seen and key.startswith("method.")}
    return left, declared(settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_knob_is_read_or_says_with_what(name, tmp_path):
    small = ("backbone.size=8",) if trains_by_gradient(name) else ()
    left, own = unread(tmp_path, *short_run(name), *small)
    assert left - own <= _REFUSED | _PRESET


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "key", "beside"),
    [
        ("fedavg", "method.training.server_lr=0.5", "method.training.server_optimizer=adam"),
        ("fedavg", "method.training.trimmed=0.2", "method.training.aggregate=trimmed_mean"),
        ("fedavg", "method.training.decay=0.5", "method.training.schedule=cosine_decay"),
        ("fedavg", "method.gaussian.samples=20", "method.ccvr=gaussian"),
        ("moon", "method.width=16", "method.representation=projection"),
        ("air", "method.tau=0.3", "method.correction=logits"),
    ],
)
def test_with_what_it_names_a_knob_is_read(method, key, beside, tmp_path):
    small = ("backbone.size=8",) if trains_by_gradient(method) else ()
    overrides = (*short_run(method), *small, key, beside, "data=digits", "tasks=2", "clients=3", "cache.enabled=false")
    settings = settings_for(tmp_path, *overrides)
    with recorded(settings) as seen:
        run(settings)
    assert keys_of(settings)[key.partition("=")[0]] in seen
