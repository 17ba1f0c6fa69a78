"""What jobs share of composing changes nothing: every kind of override gives what Hydra alone composes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from fcl_bench import composition
from fcl_bench.cli.knobs import search_also
from fcl_bench.composition import composed, config_dir, register

#: What can be typed: choices, values of every form, both of them in either order, and what Hydra refuses.
TYPED = {
    "nothing": "",
    "choices": "method=stsa data=cifar100 backbone=resnet18",
    "values": "seed=3 beta=0.5 clients=7 label_rate=1e-1",
    "values of choices": "method.ridge=0.1 method=afl wire.dtype=float16 data.validation=0.1",
    "a nested group": "hydra/launcher=basic seed=1",
    "a group at a package": "method@_global_.other=stsa",
    "a new group at a package": "+method@other=stsa other.gamma=5",
    "a preset": "+experiment/preset=[protip_tip,protip_domainnet_2] seed=1",
    "an experiment": "experiment=stsa_table1 profile=quick beta=0.1",
    "an experiment's grid": "experiment=fedran_table3 grid.full.seed=7",
    "a track": "track=features method=fedavg clients=9",
    "a new key": "+note=1 seed=2",
    "a new nested key": "+method.note=[1,2] method.note=[3]",
    "a key that is there, or not": "++seed=4 ++other=5",
    "a key that goes": "~method.ridge method=afl",
    "a key that goes if it has a value": "~seed=0",
    "a choice that goes": "~logger",
    "a key that goes after its value": "clients=3 ~clients",
    "a mapping": "wire={dtype:float16}",
    "a mapping for a group": "method={ridge:0.5} method=afl",
    "a mapping after its key": "wire.dtype=float16 wire={dtype:float64}",
    "a key after its mapping": "wire={dtype:float64} wire.dtype=float16",
    "the same key twice": "seed=1 seed=2",
    "the same choice twice": "method=afl method=stsa",
    "an interpolation": "beta=${label_rate} out=${method.name}-x +method.name=${data.name}",
    "a resolver": "+variant=published +deep.a=${variant:1,2}",
    "commas in quotes": "out='a,b' data.path=\"c,d\" data=features",
    "other quotes": r"+text='it\'s' +more='=x' +list=['a,b',c]",
    "null, truth values, empty": "split.order=null force=true data.path= data=features",
    "Hydra's own keys": "hydra.sweep.subdir=x hydra.sweeper.params={seed:'1,2'} seed=3",
    "Hydra's own search path": "hydra.searchpath=[] seed=3",
    "a key that is not there": "clints=5",
    "a key of another choice": "method=stsa method.rank=3",
    "no such choice": "method=nope seed=1",
    "no such group": "methods=stsa",
    "a new key that is there": "+seed=1",
    "a new key after its value": "other=2 +other=1",
    "a choice that cannot be forced": "++method=stsa",
    "a key that goes and is not there": "~nothing",
    "a key that goes with another value": "~seed=5",
    "several values": "seed=1,2",
    "several choices": "method=stsa,afl",
    "no grammar": "seed=[1",
    "a list for a mapping": "method=afl wire=[1]",
}


def found(compose_it: Any, typed: list[str]) -> tuple[Any, ...]:
    """What is composed: its content, and whether new keys may be added; or the error with its text."""
    try:
        config = compose_it(typed)
    except Exception as error:
        return type(error), re.sub(r"\s+", " ", str(error))
    container = OmegaConf.to_container(config, resolve=False)
    return container, list(container), OmegaConf.is_struct(config), OmegaConf.is_struct(config.wire)


def by_hydra(typed: list[str], folder: Path | None = None) -> Any:
    register(typed)
    beside = [f"hydra.searchpath=['file://{folder}']"] if folder else []
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("config", overrides=[*typed, *beside])


@pytest.mark.parametrize("typed", TYPED.values(), ids=TYPED.keys())
def test_every_override_gives_what_hydra_makes_of_it(typed: str) -> None:
    words = typed.split()
    wanted = found(by_hydra, words)
    assert found(composed, words) == wanted
    assert found(composed, words) == wanted  # what is shared is not changed by whoever takes it


def test_the_texts_above_are_of_both_kinds() -> None:
    refused = [typed for typed in TYPED.values() if len(found(composed, typed.split())) == 2]
    assert 8 < len(refused) < len(TYPED) // 2


def test_a_job_that_changes_its_configuration_changes_no_other() -> None:
    one = composed(["method=afl", "seed=1"])
    one.wire.dtype = "bfloat16"
    assert composed(["method=afl", "seed=2"]).wire.dtype == "float32"


def test_choices_are_composed_once_and_refused_ones_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    composition._of_choices.cache_clear()
    monkeypatch.setattr(
        "hydra.compose", lambda *given, **keys: asked.append(keys["overrides"]) or compose(*given, **keys)
    )
    for seed in range(5):
        assert composed(["method=stsa", f"seed={seed}", f"method.gamma=0.{seed}"]).seed == seed
    assert asked == [["method=stsa"]]
    for _ in range(2):
        with pytest.raises(HydraException):
            composed(["method=nope", "seed=1"])
    assert asked[1:] == [["method=nope"]] * 2


def test_a_folder_of_ones_own_has_groups_and_is_read_again_after_a_change(tmp_path: Path) -> None:
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "one.yaml").write_text("value: 1\n")
    typed = ["+extra=one", "seed=2"]
    try:
        search_also([tmp_path], ["--config-dir", str(tmp_path)])
        assert composed(typed).extra.value == 1
        assert found(composed, typed) == found(lambda words: by_hydra(words, tmp_path), typed)
        (tmp_path / "extra" / "one.yaml").write_text("value: 23\n")
        assert composed(typed).extra.value == 23
    finally:
        search_also([], [])
    with pytest.raises(HydraException):  # it may be a new key, and no choice any more
        composed(["extra=one"])
