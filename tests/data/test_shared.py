"""What jobs of one process share: made once per key, bounded, never stale, and with what it had to say."""

from __future__ import annotations

import logging
import os
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.data import shared as module
from fcl_bench.data.images.batches import load_pixels
from fcl_bench.data.shared import Shared, is_sharing, shared, sharing, state_of
from fcl_bench.data.sources.base import Source, loaded
from fcl_bench.data.sources.digits import Digits
from fcl_bench.data.sources.feature_file import FeatureFile
from fcl_bench.data.sources.image_folder import ImageFolder
from tests.conftest import write_features
from tests.data.sources_harness import write_folder


def aged(path, seconds=60.0):
    """As if nobody had touched it for a while."""
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def settled(monkeypatch):
    """The file system's clock is as fine as a test needs it."""
    monkeypatch.setattr(module, "_SETTLED", -1.0)


def test_nothing_is_kept_outside_a_block_nor_after_it():
    made = []
    make = lambda: made.append(1) or len(made)  # noqa: E731
    assert [shared("kind", ["a"], make, lambda _: 1) for _ in range(2)] == [1, 2]
    with sharing():
        assert is_sharing()
        assert [shared("kind", ["a"], make, lambda _: 1) for _ in range(2)] == [3, 3]
        assert shared("another kind", ["a"], make, lambda _: 1) == 4
        assert shared("kind", ["b"], make, lambda _: 1) == 5
        assert [shared("kind", None, make, lambda _: 1) for _ in range(2)] == [6, 7]
    assert not is_sharing()
    assert shared("kind", ["a"], make, lambda _: 1) == 8


def test_what_is_not_made_is_not_kept():
    with sharing():
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                shared("kind", [], lambda: 1 // 0, lambda _: 1)
        assert shared("kind", [], lambda: 5, lambda _: 1) == 5


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=40))
def test_it_holds_no_more_than_its_limit_and_the_latest_of_it(asked):
    """Against a plain list of what was used last."""
    store, oracle = Shared(limit=10), list[tuple[int, int]]()
    sizes: dict[int, int] = {}
    for key, size in asked:
        size = sizes.setdefault(key, size)
        fresh = []
        assert store.get(str(key), lambda: fresh.append(1) or key, lambda _: size) == key  # noqa: B023
        known = (key, size) in oracle
        assert bool(fresh) != known
        oracle = [entry for entry in oracle if entry[0] != key] + ([(key, size)] if size <= 10 else [])
        while sum(size for _, size in oracle) > 10:
            oracle.pop(0)
        assert store.bytes == sum(size for _, size in oracle) <= 10


def test_whoever_takes_a_value_over_hears_what_was_said_of_it(caplog):
    def make():
        logging.getLogger("fcl_bench.data.x").warning("%d classes are odd", 3)
        return 1

    with sharing(), caplog.at_level("DEBUG", logger="fcl_bench"):
        for _ in range(3):
            shared("kind", [], make, lambda _: 1)
            logging.getLogger("fcl_bench").info("done")
    said = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    one = [("fcl_bench.data.x", "WARNING", "3 classes are odd"), ("fcl_bench", "INFO", "done")]
    assert said == 3 * one


def test_what_is_said_of_one_making_is_said_once(caplog):
    make = lambda: logging.getLogger("fcl_bench.backbones.x").warning("damaged; extracting again")  # noqa: E731
    with sharing(), caplog.at_level("DEBUG", logger="fcl_bench"):
        for _ in range(3):
            shared("kind", [], make, lambda _: 1, of_value=False)
    assert len(caplog.records) == 1


def test_any_change_of_a_file_shows(tmp_path, settled):
    file, folder = tmp_path / "a.npz", tmp_path / "folder"
    folder.mkdir()
    file.write_bytes(b"one")
    states = [state_of([file, folder])]

    def changed():
        states.append(state_of([file, folder]))
        return states[-1] not in (None, *states[:-1])

    before = file.stat()
    file.write_bytes(b"two")  # of the same length, and given its old time again
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed()
    (folder / "b").write_bytes(b"")
    assert changed()
    (folder / "b").rename(folder / "c")
    assert changed()
    other = tmp_path / "other"
    other.write_bytes(b"two")
    other.replace(file)
    assert changed()
    file.unlink()
    assert changed()
    assert state_of([file, folder]) == states[-1]


def test_of_fresh_files_and_folders_behind_links_nothing_is_told(tmp_path):
    (tmp_path / "file").write_bytes(b"one")
    assert state_of([tmp_path / "file"]) is None
    assert state_of([tmp_path / "nothing"]) is not None
    assert state_of([]) == []


def test_a_link_to_a_folder_is_not_vouched_for(tmp_path, settled):
    (tmp_path / "data").mkdir()
    assert state_of([tmp_path / "data"]) is not None
    (tmp_path / "data" / "train").symlink_to(tmp_path)
    assert state_of([tmp_path / "data"]) is None


def test_a_feature_file_is_read_once_and_again_when_it_changed(tmp_path, settled):
    path = write_features(tmp_path / "f.npz")
    with sharing():
        first = loaded(FeatureFile("features", str(path)))
        assert loaded(FeatureFile("features", str(path))) is first
        assert loaded(FeatureFile("another name", str(path))) is not first
        write_features(path, seed=1)
        second = loaded(FeatureFile("features", str(path)))
    assert second.fingerprint != first.fingerprint
    assert loaded(FeatureFile("features", str(path))) is not second


def test_a_file_that_has_just_changed_is_read_each_time(tmp_path):
    path = write_features(tmp_path / "f.npz")
    with sharing():
        assert loaded(FeatureFile("features", str(path))) is not loaded(FeatureFile("features", str(path)))


def test_an_image_that_changed_is_decoded_again(tmp_path, settled):
    from PIL import Image

    for side in ("train", "test"):
        (tmp_path / side / "cat").mkdir(parents=True)
        Image.new("RGB", (4, 4), "red").save(tmp_path / side / "cat" / "0.png")
    source = ImageFolder("folder", path=str(tmp_path))
    with sharing():
        red = load_pixels(loaded(source).train, 4)
        assert load_pixels(loaded(source).train, 4) is red
        assert load_pixels(loaded(source).train, 2) is not red
        Image.new("RGB", (4, 4), "blue").save(tmp_path / "train" / "cat" / "0.png")
        blue = load_pixels(loaded(source).train, 4)
    assert red[0, :, 0, 0].tolist() == [255, 0, 0]
    assert blue[0, :, 0, 0].tolist() == [0, 0, 255]


def test_a_source_that_does_not_say_what_it_reads_is_loaded_each_time():
    class Unknown(Digits):
        reads = Source.reads

    with sharing():
        assert loaded(Digits()) is loaded(Digits())
        assert loaded(Unknown()) is not loaded(Unknown())


def test_paths_of_images_count_in_the_bytes_of_a_data_set(tmp_path):
    from fcl_bench.data.sources.base import _bytes

    source = ImageFolder("folder", path=str(write_folder(tmp_path)))
    data = source.load()
    assert _bytes(data) >= 400 * (len(data.train) + len(data.test))


def test_the_bytes_of_a_data_set_are_those_of_its_arrays():
    from fcl_bench.data.sources.base import _bytes

    digits = Digits().load()
    assert _bytes(digits) == 1797 * (8 * 8 + np.dtype(np.int64).itemsize)
