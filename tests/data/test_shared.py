"""What jobs of one process share: made once per key, bounded, and with what it had to say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.data.images.batches import load_pixels
from fcl_bench.data.shared import Shared, shared, sharing
from fcl_bench.data.sources.array_files import FeatureFile
from fcl_bench.data.sources.base import loaded
from fcl_bench.data.sources.digits import Digits
from fcl_bench.data.sources.image_source import ImageFolder
from tests.conftest import write_features
from tests.data.sources_harness import write_folder


def test_nothing_is_kept_outside_a_block_nor_after_it():
    made = []
    make = lambda: made.append(1) or len(made)  # noqa: E731
    assert [shared("kind", ["a"], make, lambda _: 1) for _ in range(2)] == [1, 2]
    with sharing():
        assert [shared("kind", ["a"], make, lambda _: 1) for _ in range(2)] == [3, 3]
        assert shared("another kind", ["a"], make, lambda _: 1) == 4
        assert shared("kind", ["b"], make, lambda _: 1) == 5
        assert [shared("kind", None, make, lambda _: 1) for _ in range(2)] == [6, 7]
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


def test_a_data_set_is_read_once_for_the_same_knobs(tmp_path):
    path = write_features(tmp_path / "f.npz")
    with sharing():
        first = loaded(FeatureFile("features", str(path)))
        assert loaded(FeatureFile("features", str(path))) is first
        assert loaded(FeatureFile("another name", str(path))) is not first
    assert loaded(FeatureFile("features", str(path))) is not first


def test_images_are_decoded_once_for_each_size(tmp_path):
    source = ImageFolder("folder", path=str(write_folder(tmp_path)))
    with sharing():
        pixels = load_pixels(loaded(source).train, 4)
        assert load_pixels(loaded(source).train, 4) is pixels
        assert load_pixels(loaded(source).train, 2) is not pixels


def test_paths_of_images_count_in_the_bytes_of_a_data_set(tmp_path):
    from fcl_bench.data.sources.base import _bytes

    source = ImageFolder("folder", path=str(write_folder(tmp_path)))
    data = source.load()
    assert _bytes(data) >= 400 * (len(data.train) + len(data.test))


def test_the_bytes_of_a_data_set_are_those_of_its_arrays():
    from fcl_bench.data.sources.base import _bytes

    digits = Digits().load()
    assert _bytes(digits) == 1797 * (8 * 8 + np.dtype(np.int64).itemsize)
