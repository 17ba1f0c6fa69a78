"""Subsets of image sources: the first images of the first classes, and nothing else is looked at."""

from __future__ import annotations

import io
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fcl_bench.data.sources.hub_images import HubImages
from fcl_bench.data.sources.image_source import ImageFolder
from fcl_bench.errors import UserError
from fcl_bench.typed import typed_instance
from tests.data.sources_harness import hub, write_folder


class InMemory(HubImages):
    """A hub data set that never was in a file; the image of row i is i + 1 pixels wide.

    `contents` replaces the bytes of some training rows; None: they are not embedded.
    """

    def __init__(self, train: list[int], test: list[int], contents: dict[int, bytes | None] | None = None, **knobs):
        super().__init__("made", "someone/made", "a" * 40, "img", "label", **knobs)
        self.rows = {"train": train, "test": test}
        self.contents = {"train": contents or {}, "test": {}}

    def origin(self):
        return "memory"

    def _table(self, side, *needed):
        import datasets

        features = datasets.Features({"img": datasets.Image(decode=False), "label": datasets.Value("int64")})
        contents = {**dict(enumerate(map(picture, range(len(self.rows[side]))))), **self.contents[side]}
        images = [{"bytes": content, "path": "elsewhere"} for content in contents.values()]
        return datasets.Dataset.from_dict({"img": images, "label": self.rows[side]}, features=features)


def picture(row: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (row + 1, 1)).save(buffer, "PPM")
    return buffer.getvalue()


def first_of_each(labels: list[int], classes: set[int], most: int | None) -> list[int]:
    """The rows that a subset keeps, by counting."""
    rows: list[int] = []
    for row, label in enumerate(labels):
        held = sum(labels[other] == label for other in rows)
        if label in classes and (most is None or held < most):
            rows.append(row)
    return rows


COUNTS = st.one_of(st.none(), st.integers(1, 4))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    train=st.lists(st.integers(0, 5), min_size=1, max_size=25),
    test=st.lists(st.integers(0, 5), min_size=1, max_size=25),
    classes=COUNTS,
    skipped=st.integers(0, 3),
    per_class=COUNTS,
    test_per_class=COUNTS,
)
def test_a_subset_is_the_first_images_of_the_first_classes(train, test, classes, skipped, per_class, test_per_class):
    knobs = {"classes": classes, "skip_classes": skipped, "per_class": per_class, "test_per_class": test_per_class}
    source = InMemory(train, test, **knobs)
    left = sorted(set(train))[skipped:]
    if not left:
        told = rf"data\.skip_classes={skipped} leaves none of the {len(set(train))} classes"
        with pytest.raises(UserError, match=told):
            source.load()
        return
    if classes is not None and classes > len(left):
        with pytest.raises(UserError, match=rf"data\.classes={classes} is more than the {len(left)} classes") as told:
            source.load()
        assert (f"after data.skip_classes={skipped}" in str(told.value)) == (skipped > 0)
        return
    everything = classes is None and not skipped
    kept = set(train) | set(test) if everything else set(left[:classes])
    data = source.load()
    for split, labels, most in ((data.train, train, per_class), (data.test, test, test_per_class)):
        rows = first_of_each(labels, kept, most)
        assert [split.inputs[index].width - 1 for index in range(len(split))] == rows
        np.testing.assert_array_equal(split.labels, np.array(labels, dtype=np.int64)[rows])


@pytest.mark.slow
def test_subsets_that_differ_have_fingerprints_that_differ():
    rows = [2, 0, 1, 0, 2, 1, 1, 0, 2]
    fingerprints = {}
    for classes in (None, 1, 2, 3):
        for per_class in (None, 1, 2, 3, 9):
            for test_per_class in (None, 1, 3):
                knobs = {"classes": classes, "per_class": per_class, "test_per_class": test_per_class}
                data = InMemory(rows, rows, **knobs).load()
                content = tuple(
                    tuple(split.inputs[index].width for index in range(len(split))) for split in (data.train, data.test)
                )
                fingerprints.setdefault(content, set()).add(data.fingerprint)
    assert len(fingerprints) == 3 * 3 * 2
    assert all(len(same) == 1 for same in fingerprints.values())
    assert len(set.union(*fingerprints.values())) == len(fingerprints)


def test_hub_images_outside_a_subset_are_not_looked_at():
    """Nor does leaving images out change by which row an unreadable one is called."""
    rows, contents = [1, 0, 1, 0, 2], {0: None, 3: b"not an image", 4: None}
    data = InMemory(rows, [0, 1, 2], contents, classes=1).load()
    np.testing.assert_array_equal(data.train.labels, [0, 0])
    np.testing.assert_array_equal(data.test.labels, [0])
    assert data.train.inputs[0].size == (2, 1)
    with pytest.raises(UserError, match="train row 3 cannot be read: not an image"):
        data.train.inputs[1]
    with pytest.raises(UserError, match="not embedded"):
        InMemory(rows, [0, 1, 2], contents).load()


def test_a_folder_can_be_cut_down_without_looking_at_the_rest(tmp_path):
    root = write_folder(tmp_path / "d")  # classes in order: "Katze ß", "a cat", "猫"
    whole = ImageFolder(path=str(root)).load()
    (root / "train" / "猫" / "0 RGB.png").unlink()
    (root / "train" / "猫" / "0 RGB.png").symlink_to(root / "nowhere")
    (root / "train" / "a cat" / "deep.tiff").write_bytes(b"not an image")
    data = ImageFolder(path=str(root), classes=2, per_class=3).load()
    np.testing.assert_array_equal(data.train.labels, [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(data.test.labels, [0] * 4 + [1] * 4)
    for mine, theirs in ((0, 0), (2, 2), (3, 4), (5, 6)):
        assert data.train.inputs[mine].tobytes() == whole.train.inputs[theirs].tobytes()
    assert data.train.fingerprint != whole.train.fingerprint
    with pytest.raises(UserError, match="cannot be read"):
        ImageFolder(path=str(root)).load()
    assert len(ImageFolder(path=str(root), classes=1, per_class=1, test_per_class=2).load().test) == 2
    with pytest.raises(UserError, match=r"data\.classes=4 is more than the 3 classes of data=imagefolder \(1 to 3\)"):
        ImageFolder(path=str(root), classes=4).load()
    with pytest.raises(UserError, match=r"data\.skip_classes=3 leaves none of the 3 classes .* \(0 to 2\)"):
        ImageFolder(path=str(root), skip_classes=3).load()


@pytest.mark.parametrize("knob", ["classes", "per_class", "test_per_class"])
def test_a_subset_of_nothing_is_refused(knob):
    for source in (ImageFolder(), hub(None)):
        with pytest.raises(UserError, match=rf"data\.{knob}=0 is out of range"):
            typed_instance(type(source), {**asdict(source), knob: 0}, "data")


def test_subsets_are_part_of_a_runs_identity_and_the_whole_is_null():
    from hydra import compose, initialize_config_dir

    from fcl_bench.composition import config_dir
    from fcl_bench.config import load_settings

    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        whole, part, folder = (
            load_settings(compose("config", overrides=list(overrides))).identity()["data"]
            for overrides in (["data=cifar100"], ["data=cifar100", "data.per_class=5"], ["data=imagefolder"])
        )
        last = load_settings(compose("config", overrides=["data=cifar100", "data.skip_classes=75"])).identity()["data"]
    knobs = {"classes": None, "per_class": None, "test_per_class": None, "skip_classes": 0}
    assert whole == {
        "choice": "HubImages",
        "name": "cifar100",
        "repo": "uoft-cs/cifar100",
        "revision": "aadb3af77e9048adbea6b47c21a81e47dd092ae5",
        "image_column": "img",
        "label_column": "fine_label",
        **knobs,
    }
    assert part == {**whole, "per_class": 5}
    assert last == {**whole, "skip_classes": 75}
    assert folder == {"choice": "ImageFolder", "name": "imagefolder", **knobs}
