"""What a run must show before it stands beside a printed number: whole data, known data, weights and code."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fcl_bench.config import Settings
from fcl_bench.results.verifying import verify

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
