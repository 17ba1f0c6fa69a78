"""Data sources: what they read, what they refuse, what their fingerprints cover."""

from __future__ import annotations

import contextlib
import io
import shutil
import socket
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fcl_bench.data.sources.array_files import FeatureFile
from fcl_bench.data.sources.digits import Digits
from fcl_bench.data.sources.hub_images import HubImages
from fcl_bench.data.sources.image_source import ImageFolder
from fcl_bench.errors import UserError
from tests.conftest import shared, write_features
from tests.data.sources_harness import hub, write_folder


def png(colour: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (colour, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(folder: Path, train: list[int], test: list[int], encoded: bytes | None = None) -> Path:
    """A data set in the hub's parquet layout; the label is the red channel."""
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    (folder / "data").mkdir(parents=True)
    for side, labels in (("train", train), ("test", test)):
        rows = {"img": [{"bytes": encoded or png(label), "path": None} for label in labels], "label": labels}
        table = datasets.Dataset.from_dict(rows, features=features)
        table.to_parquet(folder / "data" / f"{side}-00000-of-00001.parquet")
    return folder


@pytest.fixture(autouse=True)
def own_hub_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["its file", "its function"])
def test_digits_are_those_of_scikit_learn(elsewhere, tmp_path, monkeypatch):
    """Which reads them itself; the source does not import it, since that takes long, where its file is as known."""
    from sklearn.datasets import load_digits

    if elsewhere:
        found = ModuleSpec("sklearn", None, origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr("fcl_bench.data.sources.digits.find_spec", lambda _: found)
    theirs, ours = load_digits(), Digits().load()
    for side in (ours.train, ours.test):
        rows = np.flatnonzero(np.isin(np.arange(1797), _places(theirs.target, side is ours.test)))
        assert np.array_equal(side.labels, theirs.target[rows])
        assert np.array_equal(side.inputs.pixels, np.rint(theirs.images[rows] * (255 / 16)))


def _places(labels, test):
    """The places of test samples, every fifth of each class, or of the others."""
    found = []
    for label in range(10):
        mine = np.flatnonzero(labels == label)
        found += [place for number, place in enumerate(mine) if (number % 5 == 4) == test]
    return found


def test_digits_are_1797_real_images_with_a_fixed_split():
    data = Digits().load()
    assert len(data.train) + len(data.test) == 1797
    assert data.train.inputs[0].size == (8, 8)
    shares = np.bincount(data.test.labels) / (np.bincount(data.train.labels) + np.bincount(data.test.labels))
    assert ((shares > 0.18) & (shares <= 0.2)).all()
    assert Digits().load().fingerprint == data.fingerprint


def test_feature_files_keep_any_label(feature_file):
    data = FeatureFile(path=str(feature_file)).load()
    assert data.kind == "features"
    assert set(data.train.labels) == {3, 7, 11, 400, 5, 0}
    assert data.train.inputs.dtype == np.float32


def test_fingerprints_follow_the_content_not_the_path(tmp_path):
    first, copy = write_features(tmp_path / "a.npz"), tmp_path / "b.npz"
    shutil.copy(first, copy)
    relabelled = write_features(tmp_path / "c.npz", y_train=np.arange(240) % 6)
    fingerprints = [FeatureFile(path=str(p)).load().fingerprint for p in (first, copy, relabelled)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


BAD_FEATURES = {
    "short labels": ({"y_train": np.zeros(10, dtype=int)}, "240 rows and y_train has 10 labels"),
    "float labels": ({"y_train": np.zeros(240)}, "type float64"),
    "negative labels": ({"y_test": np.full(60, -1)}, "label -1"),
    "nan": ({"x_train": np.full((240, 12), np.nan)}, "NaN or infinity in 240 rows, the first is row 0"),
    "flat": ({"x_train": np.zeros(240)}, r"shape \(240,\)"),
    "widths": ({"x_test": np.zeros((60, 5))}, "12 features and x_test has 5"),
    "labels beyond int64": ({"y_train": np.full(240, 2**63 + 5, dtype=np.uint64)}, "label 9223372036854775813"),
    "long double": ({"x_train": np.zeros((240, 12), dtype=np.longdouble)}, "at most 64 bits"),
    "text": ({"x_train": np.full((240, 12), "a")}, "type <U1"),
}


@pytest.mark.parametrize("case", list(BAD_FEATURES))
def test_bad_feature_files_are_told(tmp_path, case):
    changes, message = BAD_FEATURES[case]
    with pytest.raises(UserError, match=message):
        FeatureFile(path=str(write_features(tmp_path / "f.npz", **changes))).load()


def test_files_that_are_no_feature_file_are_told(tmp_path):
    text, single, lacking, objects = (tmp_path / name for name in ("t.npz", "s.npz", "l.npz", "o.npz"))
    text.write_text("x_train,y_train\n1,2\n")
    np.save(tmp_path / "s.npy", np.zeros(3))
    (tmp_path / "s.npy").rename(single)
    np.savez(lacking, x_train=np.zeros((2, 2)), y_train=np.zeros(2, dtype=int))
    np.savez(objects, **dict.fromkeys(["x_train", "y_train", "x_test", "y_test"], np.array([{}], dtype=object)))
    for path, message in [
        (text, "not a readable"),
        (single, "single array"),
        (lacking, "lacks x_test"),
        (objects, "holds Python objects, which are never unpickled"),
    ]:
        with pytest.raises(UserError, match=message):
            FeatureFile(path=str(path)).load()
    with pytest.raises(UserError, match="does not exist"):
        FeatureFile(path=str(tmp_path / "none.npz")).load()
    with pytest.raises(UserError, match=r"needs data\.path"):
        FeatureFile().load()


def test_a_damaged_feature_file_is_told_wherever_the_damage_is(tmp_path):
    path = write_features(tmp_path / "f.npz")
    arrays = dict(np.load(path))
    np.savez_compressed(path, **arrays)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(150):
        content = np.frombuffer(whole, dtype=np.uint8).copy()
        content[rng.integers(0, len(content), 20)] ^= rng.integers(1, 256, 20, dtype=np.uint8)
        path.write_bytes(content.tobytes())
        with contextlib.suppress(UserError):  # any other error fails the test
            FeatureFile(path=str(path)).load()


def test_features_of_any_byte_order_are_read(tmp_path):
    x = np.random.default_rng(0).standard_normal((240, 12))
    plain = FeatureFile(path=str(write_features(tmp_path / "a.npz", x_train=x))).load()
    swapped = FeatureFile(path=str(write_features(tmp_path / "b.npz", x_train=x.astype(">f8")))).load()
    assert swapped.train.inputs.dtype.isnative
    np.testing.assert_array_equal(swapped.train.inputs, plain.train.inputs)
    assert swapped.fingerprint == plain.fingerprint


def test_a_local_folder_in_the_hubs_layout_is_read(tmp_path):
    data = hub(write_parquet(tmp_path / "d", train=[3, 1, 2, 1], test=[1, 2, 3])).load()
    np.testing.assert_array_equal(data.train.labels, [3, 1, 2, 1])
    assert data.train.inputs[0].getpixel((0, 0)) == (3, 0, 0)
    same = hub(write_parquet(tmp_path / "e", train=[3, 1, 2, 1], test=[1, 2, 3])).load()
    other = hub(write_parquet(tmp_path / "f", train=[3, 1, 2, 2], test=[1, 2, 3])).load()
    assert data.fingerprint == same.fingerprint != other.fingerprint


def test_hub_data_that_does_not_fit_is_told(tmp_path):
    folder = write_parquet(tmp_path / "d", train=[0, 1], test=[0, 1])
    with pytest.raises(UserError, match="no column fine_label in train .*choices: img, label"):
        hub(folder, label_column="fine_label").load()
    with pytest.raises(UserError, match="not a class label"):
        hub(folder, label_column="img").load()
    with pytest.raises(UserError, match="does not exist"):
        hub(tmp_path / "none").load()
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="no readable train split"):
        hub(empty).load()
    broken = write_parquet(tmp_path / "broken", train=[0, 1], test=[0, 1], encoded=b"not an image")
    with pytest.raises(UserError, match="train row 1 cannot be read: not an image"):
        hub(broken).load().train.inputs[1]


def test_a_hub_out_of_reach_says_what_to_put_where(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"someone/tiny could not be fetched.*data\.path=FOLDER"):
        hub(None).load()


def test_image_folders_read_all_kinds_of_images(tmp_path):
    data = ImageFolder(path=str(write_folder(tmp_path / "my images"))).load()
    assert (len(data.train), len(data.test)) == (12, 12)
    np.testing.assert_array_equal(np.unique(data.train.labels), [0, 1, 2])
    assert all(data.train.inputs[i].convert("RGB").size for i in range(12))
    deep = next(data.train.inputs[i] for i in range(12) if "deep" in data.train.inputs.describe(i))
    with Image.open(tmp_path / "my images" / "train" / "Katze ß" / "deep.tiff") as original:
        np.testing.assert_array_equal(np.asarray(deep), np.rint(np.asarray(original) / 257))
    moved = shutil.copytree(tmp_path / "my images", tmp_path / "elsewhere")
    assert ImageFolder(path=str(moved)).load().fingerprint == data.fingerprint


def test_an_unreadable_image_is_named(tmp_path):
    root = write_folder(tmp_path / "d")
    (root / "train" / "a cat" / "0 RGB.png").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"a cat.0 RGB\.png cannot be read: not an image"):
        ImageFolder(path=str(root)).load().train.inputs[4 * 1]  # "Katze ß" < "a cat" < "猫"
    whole = (root / "train" / "猫" / "0 RGB.png").read_bytes()
    (root / "train" / "猫" / "0 RGB.png").write_bytes(whole[: len(whole) // 2])
    data = ImageFolder(path=str(root)).load()
    with pytest.raises(UserError, match=r"猫.0 RGB\.png cannot be read"):
        [data.train.inputs[i] for i in range(len(data.train)) if data.train.labels[i] == 2]


def test_folders_without_the_layout_are_told(tmp_path):
    with pytest.raises(UserError, match="has no train/<class>/ folders"):
        ImageFolder(path=str(tmp_path)).load()
    for side in ("train", "test"):
        (tmp_path / side / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="no images under train/"):
        ImageFolder(path=str(tmp_path)).load()
    for side in ("train", "test"):
        Image.new("RGB", (2, 2)).save(tmp_path / side / "a" / "1.png")
    (tmp_path / "train" / "b").mkdir()
    with pytest.raises(UserError, match="no images in train/b/"):
        ImageFolder(path=str(tmp_path)).load()
    (tmp_path / "train" / "b").rmdir()
    (tmp_path / "test" / "b").mkdir()
    with pytest.raises(UserError, match="no images in test/b/"):
        ImageFolder(path=str(tmp_path)).load()


def test_a_class_in_one_of_the_two_folders_only(tmp_path):
    """Those of test/ only are numbered behind the others, and not there with data.classes."""
    for name in ("train/b", "train/c", "test/a", "test/c"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(tmp_path / name / "1.png")
    data = ImageFolder(path=str(tmp_path)).load()
    assert data.train.labels.tolist() == [0, 1]
    assert data.test.labels.tolist() == [1, 2]
    assert ImageFolder(path=str(tmp_path), classes=2).load().test.labels.tolist() == [1]
    last = ImageFolder(path=str(tmp_path), skip_classes=1).load()
    assert (last.train.labels.tolist(), last.test.labels.tolist()) == ([1], [1])
    by_copy = HubImages("cifar10", "x/y", "r", "img", "label", path=str(tmp_path), skip_classes=1).load()
    assert by_copy.train.labels.tolist() == [1]


@pytest.mark.slow
def test_the_real_cifar100_is_whole():
    folder = shared("data/cifar100")
    data = HubImages("cifar100", "uoft-cs/cifar100", "local", "img", "fine_label", path=str(folder)).load()
    assert (len(data.train), len(data.test)) == (50_000, 10_000)
    np.testing.assert_array_equal(np.bincount(data.train.labels), np.full(100, 500))
    np.testing.assert_array_equal(np.bincount(data.test.labels), np.full(100, 100))
    assert data.test.inputs[9_999].size == (32, 32)


def test_labels_may_be_names(tmp_path):
    names = np.array(["zebra", "ant", "ox", "bee", "cat", "dog"])
    which = np.arange(240) % 6
    changes = {"y_train": names[which], "y_test": names[which[:60]].astype("S")}
    data = FeatureFile(path=str(write_features(tmp_path / "named.npz", **changes))).load()
    assert data.class_names == ("ant", "bee", "cat", "dog", "ox", "zebra")
    for split, length in ((data.train, 240), (data.test, 60)):
        assert [data.class_names[label] for label in split.labels] == names[which[:length]].tolist()
    numbered = FeatureFile(path=str(write_features(tmp_path / "numbers.npz"))).load()
    assert numbered.class_names == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": np.array(["a"] * 60)}, "y_test holds names and y_train has type int64"),
        ({"y_train": np.array(["a"] * 240, dtype=object)}, "holds Python objects, which are never unpickled"),
        ({"y_train": np.array([["a"]] * 240), "y_test": np.array(["a"] * 60)}, "y_train has shape"),
    ],
)
def test_names_that_cannot_be_labels_are_told(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        FeatureFile(path=str(write_features(tmp_path / "f.npz", **changes))).load()


def test_a_hub_that_does_not_answer_is_told_at_once(monkeypatch):
    """A dead endpoint on this machine: the hub's own client would try for most of a minute."""
    import time

    from huggingface_hub import constants

    from fcl_bench.data.sources.hub import cache_unless_reachable, unreachable

    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", dead)
        monkeypatch.setattr("urllib.request.getproxies", dict)
        begin = time.monotonic()
        with pytest.raises(UserError, match=r"someone/tiny could not be fetched.*127\.0\.0\.1:\d+ does not answer"):
            hub(None).load()
        with cache_unless_reachable() as why:
            assert constants.HF_HUB_OFFLINE is True
            assert "does not answer: Connection refused" in why
        assert constants.HF_HUB_OFFLINE is False
        assert time.monotonic() - begin < 5
        held.listen()
        assert unreachable() == ""
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
        monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://proxy"})
        assert unreachable() == ""  # the proxy may reach it
