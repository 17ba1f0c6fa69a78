"""A data set of one's own: a class with `load`, and what is said where it returns something else than a data set."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fcl_bench.backbones.backbone import Identity
from fcl_bench.backbones.extract import extract_features
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, Source, Split, loaded
from fcl_bench.errors import UserError

X = np.arange(12.0).reshape(6, 2)
LABELS = np.array([0, 1, 2, 0, 1, 2])
RIGHT = Split(LABELS, X, "hash")
IMAGES = replace(RIGHT, inputs=ArrayImages(np.zeros((6, 8, 8), dtype=np.uint8)))


@dataclass
class Mine(Source):
    returned: object
    name: str = "mine"

    def load(self):
        return self.returned


@pytest.mark.parametrize("split", [RIGHT, IMAGES, replace(RIGHT, domains=LABELS), replace(RIGHT, inputs=X.astype(int))])
def test_features_images_and_domains_are_taken(split):
    dataset = Dataset("mine", split, split)
    taken = loaded(Mine(dataset))  # a copy, since names are cleaned, but of no array
    assert taken.train is dataset.train
    assert taken.test is dataset.test


def test_a_feature_that_is_no_number_is_blamed_on_the_data():
    split = replace(RIGHT, inputs=np.where(X == 7, np.nan, X))
    data, cpu = Dataset("mine", split, RIGHT), torch.device("cpu")
    with pytest.raises(UserError, match=r"not finite for train sample 3 \(finite numbers in the data\)"):
        extract_features("identity", Identity().open(data, cpu), data, None)


WRONG = {
    "nothing": (None, "Mine.load returned None (a Dataset"),
    "two sides": ((RIGHT, RIGHT), "Mine.load returned a tuple (a Dataset"),
    "pairs": (Dataset("mine", (X, LABELS), RIGHT), "Mine.load: train is a tuple (a Split"),
    "list of labels": (replace(RIGHT, labels=LABELS.tolist()), "train.labels is a list (an array (n,) of int64)"),
    "names": (replace(RIGHT, labels=LABELS.astype(str)), "train.labels is an array (6,) of <U21 (an array (n,)"),
    "shares": (
        replace(RIGHT, labels=LABELS / 2),
        "train.labels is an array (6,) of float64 (an array (n,) of int64)",
    ),
    "below zero": (replace(RIGHT, labels=LABELS - 1), "train.labels holds -1 (numbers from 0 on)"),
    "fewer labels": (replace(RIGHT, labels=LABELS[:5]), "Mine.load: train has 5 labels and 6 inputs (as many of each)"),
    "list of rows": (replace(RIGHT, inputs=X.tolist()), "train.inputs is a list (features, an array (n, d)"),
    "one number each": (
        replace(RIGHT, inputs=X[:, 0]),
        "train.inputs is an array (6,) of float64 (features, an array",
    ),
    "pixels alone": (replace(RIGHT, inputs=np.zeros((6, 8, 8))), "or images, such as ArrayImages(pixels))"),
    "fewer domains": (replace(RIGHT, domains=LABELS[1:]), "train has 6 labels and 5 domains (as many of each)"),
    "other width": (Dataset("mine", RIGHT, replace(RIGHT, inputs=X[:, :1])), "2 features in train and 1 in test (the"),
}


@pytest.mark.parametrize(("returned", "told"), WRONG.values(), ids=WRONG)
def test_anything_else_is_named(returned, told):
    dataset = Dataset("mine", returned, RIGHT) if isinstance(returned, Split) else returned
    with pytest.raises(UserError) as caught:
        loaded(Mine(dataset))
    assert told in str(caught.value)
