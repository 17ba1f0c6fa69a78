"""Finds the runs that have exactly the setting of a printed number, and says whose data or code is unknown."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fcl_bench.composition import composed
from fcl_bench.config import Settings, load_settings, number_text, text
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import RunFolder
from fcl_bench.files import read_json
from fcl_bench.results.verifying import settings_in, verify

UNKNOWN_DATA, UNKNOWN_WEIGHTS, UNKNOWN_CODE = "unknown data", "unknown weights", "unknown code"
#: The record is not what follows from the folder's other files (`results.verifying`).
EDITED = "edited record"


@functools.cache
def known() -> dict[str, dict[str, list[str]]]:
    """Return known.yaml: "data" and "weights", each a name -> hashes."""
    found: dict[str, dict[str, list[str]]] = yaml.safe_load(Path(__file__).with_name("known.yaml").read_text())
    return found


def known_as(kind: str, fingerprint: str) -> str:
    """Return the name under which known.yaml has a hash of the kind "data" or "weights"; "" for one that it lacks."""
    return next((name for name, hashes in known()[kind].items() if fingerprint in hashes), "")


def doubts(record: Mapping[str, Any], settings: Settings, folder: Path) -> list[str]:
    """Return why a run is not known to be of its settings; nothing for one that is.

    Args:
        record: the run's run.json.
        settings: the run's, of its config.yaml.
        folder: the run's; a copy of a model may be large, and its checksum is not verified here.
    """
    weights = weights_of(record, settings.backbone)
    found = {
        UNKNOWN_DATA: record["data_fingerprint"] in known()["data"].get(settings.data.name, []),
        UNKNOWN_WEIGHTS: weights is None or weights in known()["weights"].get(settings.backbone.name, []),
        UNKNOWN_CODE: re.fullmatch(r"[0-9a-f]{40}", record["environment"]["git_commit"] or ""),
        EDITED: not verify(folder, read=()).wrong,
    }
    return [doubt for doubt, holds in found.items() if not holds]


def weights_of(record: Mapping[str, Any], backbone: Any) -> str | None:
    """Return the hash of a network's weights that the seed does not draw, "" where the record has none; None: no such.

    Args:
        record: the run's run.json.
        backbone: of its settings.
    """
    if backbone.draws_weights:
        loads = getattr(backbone, "pretrained", False) or record["checkpoint"] is not None
        return (record["checkpoint"] or "") if loads else None
    return record["features"].get("weights", "" if hasattr(backbone, "pretrained") else None)


def other_counts(record: Mapping[str, Any], folder: Path, wanted: Settings) -> list[str]:
    """Return which numbers of samples a run has that the whole data set does not have.

    Args:
        record, folder: the run's run.json and its folder.
        wanted: settings that take the data set whole.
    """
    about = wanted.data.about
    if about.train is None or about.test is None:
        return []
    tests = int(pd.read_csv(folder / "tasks.csv")["test_samples"].sum()) + record["unseen_test_samples"]
    here, there = {"test": tests}, {"test": about.test}
    # A stream that leaves classes out, or makes some rare, learns from fewer samples than there are.
    if not record["unseen_test_samples"] and getattr(wanted.split, "imbalance", 1) == 1:
        here, there = {"train": sum(record["class_samples"]), **here}, {"train": about.train, **there}
    if getattr(wanted.data, "train_split", "train") == getattr(wanted.data, "test_split", "test"):
        # The source cuts one split in two, by shares of each class: only their sum is sure.
        here, there = ({"all": sum(counts.values())} if len(counts) == 2 else {} for counts in (here, there))
    return [f"{side} samples {there[side]}, here {here[side]}" for side in here if here[side] != there[side]]


log = logging.getLogger(__name__)

#: The columns of a printed number that are compared with the record of a run.
STATED = ("tasks", "clients", "beta")
#: What the copy of a paper has lost of a number: whose it is.
LOST_METHOD = "which of the eight methods is lost in the copy"
#: Why no run can stand beside it; where there cannot be such a method, its words go on with ": " and why.
NO_METHOD = "no such method here"
#: The end of words about a value that a paper does not say and that we had to choose.
_OURS = ": ours"
#: Keys that do not affect the numbers.
_INDIFFERENT = {"seed", "drift", "evaluate_rounds", "predictions", "method.bounds", "method.theory"}
#: A metric -> keys that affect it alone: the best of every round is not the best of every second.
_DIFFERENT_FOR = {"A_T_best": {"evaluate_rounds"}}
#: Keys of data that a run's id leaves out, since the fingerprint tells them; a printed setting has no fingerprint.
_SIDES = ("train_split", "test_split")


def words_without_key(setting: str) -> list[str]:
    """Return the quoted words of a printed setting for which we have no key; no run can have such a setting."""
    return [words for words in _quoted(setting) if not words.endswith(_OURS)]


def left_to_us(setting: str) -> list[str]:
    """Return the quoted words of a setting about values that the paper does not say; those in the setting are ours."""
    return [words.removesuffix(_OURS) for words in _quoted(setting) if words.endswith(_OURS)]


def _quoted(setting: str) -> list[str]:
    return re.findall(r'"([^"]*)"', setting)


def overrides(cell: pd.Series) -> tuple[str, ...]:
    """Return the overrides of `fcl-bench` for a printed number; what the paper does not say is left out."""
    stated = [f"{key}={cell[key]}" for key in ("method", "data", "backbone", *STATED) if cell[key]]
    return (*stated, *re.sub(r'"[^"]*"', " ", cell["setting"]).split())


@functools.cache
def settings_of(overrides: tuple[str, ...]) -> Settings:
    """Return the settings that Hydra composes of `overrides`. Raises a `UserError` for invalid values."""
    return load_settings(composed(overrides))


def comparable(settings: Settings, metric: str) -> dict[str, Any]:
    """Return the flat identity, without keys that do not affect the numbers, or not those of `metric`."""
    indifferent = _INDIFFERENT - _DIFFERENT_FOR.get(metric, set())
    sides = {f"data.{side}": getattr(settings.data, side) for side in _SIDES if hasattr(settings.data, side)}
    return {key: value for key, value in (_flat(settings.identity()) | sides).items() if key not in indifferent}


class Matcher:
    """Compares runs with printed settings.

    Args:
        runs: the result of `used_runs`; may be empty.
        folder: the folder that holds the run folders.
    """

    def __init__(self, runs: pd.DataFrame, folder: Path) -> None:
        self._runs = runs
        self._folder = folder
        # A run stands beside many numbers, and a value is printed of many: each is read once.
        self._config = functools.cache(lambda run: RunFolder(folder / run).config())
        self._record = functools.cache(lambda run: read_json(folder / run / "run.json"))
        self._settings = functools.cache(self._settings_of)
        self._having = functools.cache(lambda key, value: (runs[key].map(text) == value).to_numpy(bool))
        self.doubts = functools.cache(self._doubts)

    def differences(self, cell: pd.Series) -> dict[Hashable, list[str]]:
        """Return what else differs in runs that have the method, tasks, clients, beta and data of a printed number.

        What the paper leaves open may be anything; every other key must have the value that the printed setting gives
        it, or else our default. Seeds, paths and the device do not count, nor do reports beside the result; but which
        rounds were tested counts for the best of them.

        Returns:
            Index in the frame of runs -> "key=value, here value", nothing for a run of exactly this setting.
        """
        if self._runs.empty:
            return {}
        candidates = np.ones(len(self._runs), dtype=bool)
        for key in ("method", *STATED):
            if cell[key]:
                candidates = candidates & self._having(key, number_text(cell[key]))
        if not candidates.any():
            return {}
        # Only what runs could have is composed whole.
        whole = settings_of((f"data={cell['data']}",)).data
        candidates = candidates & self._having("data", whole.name)
        if not candidates.any():
            return {}
        wanted = settings_of(overrides(cell))
        there = comparable(wanted, cell["metric"])
        return {
            index: self._differing(run, cell, wanted, there, whole) for index, run in self._runs[candidates].iterrows()
        }

    def _differing(
        self, run: pd.Series, cell: pd.Series, wanted: Settings, there: dict[str, Any], whole: Any
    ) -> list[str]:
        settings = self._settings(run["folder"])
        if settings is None:
            return ["a configuration of another version"]
        here = comparable(settings, cell["metric"])
        left_open = {key for key in STATED if not cell[key]}
        found = [
            f"{key}={_shown(there, key)}, here {_shown(here, key)}"
            for key in sorted({*there, *here} - left_open)
            if there.get(key) != here.get(key)
        ]
        if run["method.revision"] != str(wanted.method.revision):
            found.append(f"revision {wanted.method.revision} of the method, here {run['method.revision']}")
        if not found and wanted.data == whole:
            return other_counts(self._record(run["folder"]), self._folder / run["folder"], wanted)
        return found

    def _doubts(self, folder: str) -> str:
        """Return why a run that has a printed setting, by its own account, is not known to have it; "" if it is."""
        settings = self._settings(folder)
        assert settings is not None  # it was compared
        return ", ".join(doubts(self._record(folder), settings, self._folder / folder))

    def _settings_of(self, folder: str) -> Settings | None:
        """Return a run's settings; None if this version of the code has no such configuration."""
        try:
            return settings_in(self._config(folder))
        except UserError as error:
            log.debug("run %s: %s", folder, error)
            return None


def groups_of(
    differences: dict[Hashable, list[str]],
    runs: pd.DataFrame,
    left_open: Sequence[str],
    doubted: Mapping[Hashable, str],
) -> dict[str, list[Hashable]]:
    """Group the runs without differences by the values of what the paper leaves open: "beta 0.1" -> indices.

    Runs on other features or files than others (their fingerprints tell) are kept apart from these, too, and so are
    the `doubted` ones (index -> why).
    """
    exact = [index for index, differing in differences.items() if not differing]
    if not exact:
        return {}
    prints = [key for key in ("features", "data_fingerprint") if key in runs and runs.loc[exact, key].nunique() > 1]
    found: dict[str, list[Hashable]] = {}
    for index in exact:
        difference = ", ".join(f"{key} {text(runs.loc[index, key]) or 'none'}" for key in (*left_open, *prints))
        found.setdefault(", ".join(filter(None, [difference, doubted.get(index)])), []).append(index)
    return found


def _shown(identity: dict[str, Any], key: str) -> str:
    """Return the value of a key as the user types it; "nothing" for a key that the choice does not have."""
    value = identity.get(key, "nothing")
    return json.dumps(value) if value is None or isinstance(value, list | dict) else text(value)


def _flat(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, found in node.items():
        flat |= _flat(found, f"{prefix}{key}.") if isinstance(found, dict) and found else {f"{prefix}{key}": found}
    return flat
