"""The settings of printed numbers: which words are overrides, and which no key expresses."""

from __future__ import annotations

import pandas as pd

from fcl_bench.papers.matching import overrides, words_without_key


def test_quoted_words_are_told_from_overrides():
    stated = {"method": "fedran", "data": "digits", "backbone": "pixels", "tasks": "2", "clients": "2", "beta": "0.1"}
    printed = pd.Series({**stated, "setting": 'split=si_blurry "after task 2" method.M=null "a=b"'})
    assert words_without_key(printed["setting"]) == ["after task 2", "a=b"]
    assert overrides(printed)[-2:] == ("split=si_blurry", "method.M=null")
