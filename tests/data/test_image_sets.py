"""What is particular to ImageNet-R, VTAB and DomainNet: how they are cut, and their folders as released."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from fcl_bench.data.sources.domainnet import DomainNet, _drawn
from fcl_bench.data.sources.hub_images import HubImages
from fcl_bench.data.sources.imagenet_r import ImageNetR
from fcl_bench.data.sources.vtab import PARTS, Vtab
from fcl_bench.errors import UserError
from fcl_bench.typed import typed_instance
from tests.data.hub_copies import COPIES, DOMAINS, png


@pytest.fixture(autouse=True)
def own_arrow_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")


def imagenet_r(path: Path, **knobs) -> ImageNetR:
    return ImageNetR("imagenet_r", "axiong/imagenet-r", "r", "image", "wnid", path=str(path), **knobs)


def domainnet(path: Path, **knobs) -> DomainNet:
    return DomainNet("domainnet", "wltjr1007/DomainNet", "r", "image", "label", path=str(path), **knobs)


def pixels(split) -> list[tuple[int, int, int]]:
    return [split.inputs[index].getpixel((0, 0)) for index in range(len(split))]


def copy_of(name: str, tmp_path: Path, repo: str, **changes) -> Path:
    COPIES[name](tmp_path, **changes)
    return tmp_path / repo


def write_images(folder: Path, images: dict[str, bytes]) -> Path:
    for name, content in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_imagenet_r_is_cut_alike_from_parquet_and_from_the_released_folder(tmp_path):
    parquet = copy_of("imagenet_r", tmp_path, "axiong/imagenet-r", per_class=23)
    released = write_images(
        tmp_path / "imagenet-r",
        {f"n0{label + 1}/{n}.png": png(label, 0, n) for n in range(23) for label in range(3)},
    )
    data, other = imagenet_r(parquet).load(), imagenet_r(released).load()
    for mine, theirs in ((data.train, other.train), (data.test, other.test)):
        assert sorted(pixels(mine)) == sorted(pixels(theirs))
        assert [red for red, _, _ in pixels(theirs)] == list(theirs.labels)
    assert np.bincount(data.test.labels).tolist() == [5, 5, 5]
    small = imagenet_r(released, classes=2, per_class=3, test_per_class=1).load()
    assert np.bincount(small.train.labels).tolist() == [3, 3]
    assert np.bincount(small.test.labels).tolist() == [1, 1]
    assert set(pixels(small.train)) < set(pixels(data.train))


def test_imagenet_r_that_is_cut_already_stays_so(tmp_path):
    names = {
        f"{side}/n0{label}/{n}.png": png(label, 0, n)
        for side, count in (("train", 3), ("test", 2))
        for n in range(count)
        for label in (1, 2)
    }
    folder = write_images(tmp_path / "d", names)
    data = imagenet_r(folder).load()
    assert (len(data.train), len(data.test)) == (6, 4)


def test_imagenet_r_without_images_is_told(tmp_path):
    with pytest.raises(UserError, match=r"has no <wnid>/ folders and no parquet files"):
        imagenet_r(tmp_path).load()
    (tmp_path / "n01").mkdir()
    with pytest.raises(UserError, match="no images under it"):
        imagenet_r(tmp_path).load()


def test_a_hub_data_set_is_read_from_class_folders_too(tmp_path):
    names = {
        f"{side}/{name}/{n}.png": png(label, 0, n)
        for side in ("train", "test")
        for n in range(2)
        for label, name in enumerate(("airplane", "bird"))
    }
    folder = write_images(tmp_path / "d", names)
    data = HubImages("cifar10", "uoft-cs/cifar10", "r", "img", "label", path=str(folder), per_class=1).load()
    assert [red for red, _, _ in pixels(data.train)] == list(data.train.labels) == [0, 1]
    assert len(data.test) == 4
    assert data.name == "cifar10"


def test_domainnet_draws_so_many_of_each_domain_whatever_the_runs_seed(tmp_path):
    folder = copy_of("domainnet", tmp_path, "wltjr1007/DomainNet", per_domain=20)
    whole = domainnet(folder, per_domain=None).load()
    data = domainnet(folder, per_domain=7).load()
    assert np.bincount(data.train.domains).tolist() == [7] * 6
    assert len(data.test) == 24
    assert set(pixels(data.train)) < set(pixels(whole.train))
    assert domainnet(folder, per_domain=7).load().fingerprint == data.fingerprint
    # The draw is per domain: each has its own.
    drawn = [{blue for _, green, blue in pixels(data.train) if green == domain} for domain in range(6)]
    assert len({frozenset(each) for each in drawn}) > 1
    assert domainnet(folder, per_domain=50).load().fingerprint == whole.fingerprint
    small = domainnet(folder, per_domain=None, per_class=2, test_per_class=1).load()
    assert np.bincount(small.train.labels * 6 + small.train.domains).tolist() == [2] * 12
    assert np.bincount(small.test.labels * 6 + small.test.domains).tolist() == [1] * 12


def test_the_domainnet_draw_is_a_known_one():
    """It may never change, or results would lose their data."""
    domains = np.repeat(np.arange(3), 10)
    np.testing.assert_array_equal(_drawn(domains, 3), [7, 8, 9, 10, 17, 18, 25, 26, 29])


def test_domainnet_is_read_as_released(tmp_path):
    names, lists = {}, {}
    for domain, name in enumerate(DOMAINS):
        for side, count in (("train", 6), ("test", 2)):
            for n in range(count):
                file = f"{name}/class {n % 2}/{side} {n}.png"
                names[file] = png(n % 2, domain, n)
                lists.setdefault(f"{name}_{side}.txt", []).append(f"{file} {n % 2}")
    folder = write_images(tmp_path / "d", names)
    for name, lines in lists.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    data = domainnet(folder, per_domain=4).load()
    assert data.domain_names == tuple(DOMAINS)
    assert np.bincount(data.train.domains).tolist() == [4] * 6
    for split in (data.train, data.test):
        assert [red for red, _, _ in pixels(split)] == list(split.labels)
        assert [green for _, green, _ in pixels(split)] == list(split.domains)
    (folder / "real_test.txt").write_text("real/class 0/test 0.png\n")
    with pytest.raises(UserError, match="line 1 of real_test.txt is 'real/class 0/test 0.png'"):
        domainnet(folder).load()
    (folder / "real_test.txt").unlink()
    with pytest.raises(UserError, match="real has only one of its two lists"):
        domainnet(folder).load()


def test_domainnet_knobs_are_checked():
    with pytest.raises(UserError, match=r"data\.per_domain=0 is out of range"):
        typed_instance(DomainNet, {**asdict(domainnet(Path("x"))), "per_domain": 0}, "data")


def test_a_domain_without_a_name_is_told(tmp_path):
    import datasets

    from tests.data.hub_copies import shards

    rows = [{"image": png(0, 0, 0), "domain": 6, "label": 0}]
    types = {"domain": datasets.Value("int64"), "label": datasets.Value("int64")}
    for split in ("train", "test"):
        shards(tmp_path / "data", split, 1, rows, types, "image")
    with pytest.raises(UserError, match="column domain of train holds the domain 6 .0 to 5"):
        domainnet(tmp_path).load()


@pytest.mark.slow
def test_vtab_is_read_from_a_folder_a_data_set(tmp_path):
    COPIES["vtab"](tmp_path / "hub")
    for part in PARTS:
        shutil.copytree(tmp_path / "hub" / part.repo, tmp_path / "mine" / part.name)
    data = Vtab(path=str(tmp_path / "mine")).load()
    assert (len(data.train), len(data.test)) == (100, 50)
    assert data.domain_names == ("resisc45", "dtd", "pets", "eurosat", "flowers102")
    np.testing.assert_array_equal(np.unique(data.train.labels), np.arange(50))
    small = Vtab(path=str(tmp_path / "mine"), classes=12, per_class=1).load()
    assert sorted(small.train.labels) == list(range(12))
    shutil.rmtree(tmp_path / "mine" / "pets")
    with pytest.raises(UserError, match=r"mine/pets does not exist"):
        Vtab(path=str(tmp_path / "mine")).load()


@pytest.mark.parametrize("first", [10, 0])
def test_vtab_is_read_as_released(tmp_path, first):
    """Fifty classes named by numbers, 10 to 59; also where the numbers' alphabetical order is another."""
    names = {
        f"{side}/{first + label}/{n}.png": png(label, 0, n)
        for side, count in (("train", 2), ("test", 1))
        for n in range(count)
        for label in range(50)
    }
    folder = write_images(tmp_path / "vtab", names)
    data = Vtab(path=str(folder)).load()
    for split in (data.train, data.test):
        assert [red for red, _, _ in pixels(split)] == list(split.labels)
        np.testing.assert_array_equal(split.domains, split.labels // 10)
    shutil.rmtree(folder / "test" / str(first + 7))
    with pytest.raises(UserError, match=r"has 49 classes in test/ \(50 classes, the same in train/ and test/"):
        Vtab(path=str(folder)).load()
