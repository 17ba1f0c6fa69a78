"""The settings of printed numbers: which words are overrides, and which no key expresses."""

from __future__ import annotations

import pandas as pd
import pytest

from fcl_bench.composition import composed
from fcl_bench.config import load_settings
from fcl_bench.papers import matching
from fcl_bench.papers.matching import overrides, settings_of, words_without_key


def test_quoted_words_are_told_from_overrides():
    stated = {"method": "fedran", "data": "digits", "backbone": "pixels", "tasks": "2", "clients": "2", "beta": "0.1"}
    printed = pd.Series({**stated, "setting": 'split=si_blurry "after task 2" method.M=null "a=b"'})
    assert words_without_key(printed["setting"]) == ["after task 2", "a=b"]
    assert overrides(printed)[-2:] == ("split=si_blurry", "method.M=null")


@pytest.mark.parametrize(
    "typed",
    [
        ("method=fedran", "data=cifar100", "backbone=resnet18", "tasks=10", "beta=0.5", "method.rank=256"),
        (
            "experiment=afl_table3",
            "profile=quick",
            "experiment/preset=[digits_1,afl]",
            "method.gamma=0",
            "method.ri=False",
        ),
        ("experiment=fedran_table3", "beta=1", "seed=2", "wire.dtype=float16"),
        ("method=fedavg", "backbone=tiny", "method.training.augment=none", "split.first=null"),
    ],
)
def test_keys_laid_over_choices_are_what_hydra_composes_of_both(typed):
    assert settings_of(typed).resolved == load_settings(composed(typed)).resolved


def test_settings_that_differ_in_keys_alone_are_composed_once(monkeypatch):
    asked = []
    matching._of_choices.cache_clear()
    monkeypatch.setattr(matching, "composed", lambda typed: asked.append(typed) or composed(typed))
    for gamma in ("0.125", "0.25", "0.5"):
        assert settings_of(("method=stsa", "data=digits", f"method.gamma={gamma}")).method.gamma == float(gamma)
    assert len(asked) == 1
