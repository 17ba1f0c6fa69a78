"""The hub's files: downloaded, resumed, verified, found again; against a hub on this machine."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.sources.hub import (
    Repository,
    damaged,
    download,
    incomplete,
    locate,
    remove_file,
    split_of,
)
from fcl_bench.data.sources.hub_images import HubImages
from fcl_bench.errors import UserError
from tests.data.fake_hub import FakeHub
from tests.data.hub_copies import COPIES, DOMAINS
from tests.small_runs import settings_for


def source(name: str, hub: FakeHub, tmp_path: Path, *keys: str):
    """The source that `data=NAME` gives, the hub's commits being those that the YAML pins."""
    made = settings_for(tmp_path, f"data={name}", *keys).data
    for wanted in made.repositories():
        if wanted.revision is not None:
            hub.commits[wanted.repo] = wanted.revision
    return made


def pixels(split) -> list[tuple[int, int, int]]:
    return [split.inputs[index].getpixel((0, 0)) for index in range(len(split))]


def no_network(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


WANTED = Repository("cifar10", "uoft-cs/cifar10", None, ("train", "test"))


@pytest.mark.slow_cases("vtab")
@pytest.mark.parametrize("name", list(COPIES))
def test_every_data_set_downloads_with_its_own_settings(name, hub, tmp_path, monkeypatch, caplog):
    COPIES[name](hub.root)
    made = source(name, hub, tmp_path)
    with caplog.at_level(logging.INFO, logger="fcl_bench"):
        data = made.load()
    assert f"data {name}: downloading " in caplog.text
    assert " kB from the hub to " in caplog.text
    assert_content(name, data)
    for wanted in made.repositories():
        assert f"{wanted.repo} at {wanted.revision}" in data.origin
        assert damaged(locate(wanted).folder) == []
    # Neither the README nor a split that is not read.
    assert not any("validation" in path or path.endswith(".md") for path, _ in hub.requests)
    asked = len(hub.requests)
    no_network(monkeypatch)
    again = source(name, hub, tmp_path).load()
    assert len(hub.requests) == asked
    assert again.fingerprint == data.fingerprint


def assert_content(name: str, data: Dataset) -> None:
    """Labels and domains are those that the images' pixels tell."""
    for split, base in ((data.train, 0), (data.test, 100)):
        seen = pixels(split)
        if name == "vtab":
            # The classes a to j: labels 11 down to 2, in Flowers labels 0 to 9.
            expected = [(9 - column % 10 + 2 if column < 40 else column % 10) for column in split.labels]
            assert [red for red, _, _ in seen] == expected
            np.testing.assert_array_equal(split.domains, split.labels // 10)
            assert set(split.labels) == set(range(50))
        else:
            assert [red for red, _, _ in seen] == list(split.labels)
        if name == "domainnet":
            assert [green for _, green, _ in seen] == list(split.domains)
        if name != "imagenet_r":
            assert all(base <= blue < base + 100 for _, _, blue in seen)
    if name == "domainnet":
        assert data.domain_names == tuple(DOMAINS)
    if name == "imagenet_r":
        assert np.bincount(data.train.labels).tolist() == [8, 8, 8]
        assert np.bincount(data.test.labels).tolist() == [2, 2, 2]


@pytest.mark.slow_cases("domainnet", "tiny_imagenet")
@pytest.mark.parametrize("name", ["cifar10", "tiny_imagenet", "imagenet_r", "domainnet"])
def test_a_downloaded_folder_can_be_carried_elsewhere(name, hub, tmp_path, monkeypatch):
    COPIES[name](hub.root)
    made = source(name, hub, tmp_path)
    data = made.load()
    [wanted] = made.repositories()
    of_cache = locate(wanted).folder.parents[1]
    carried = shutil.copytree(of_cache, tmp_path / "carried", symlinks=True)
    shutil.rmtree(tmp_path / "home")
    no_network(monkeypatch)
    copy = source(name, hub, tmp_path, f"data.path={carried}").load()
    assert copy.fingerprint == data.fingerprint
    assert damaged(carried) == []
    # A folder that tells both sides by the words train and test will do.
    for file in carried.rglob("valid-*.parquet"):
        file.rename(file.with_name(file.name.replace("valid", "test")))
    assert source(name, hub, tmp_path, f"data.path={carried}").load().fingerprint == data.fingerprint


def test_an_interrupted_download_goes_on_with_the_file_that_broke_off(hub):
    COPIES["cifar10"](hub.root)
    hub.cut = 500
    with pytest.raises(UserError, match=r"the download of plain_text/\S+ broke off: .*goes on with this file"):
        download(WANTED)
    assert locate(WANTED) is None
    hub.cut = None
    snapshot = download(WANTED)
    folder = snapshot.folder
    for split in ("train", "test"):
        [file] = snapshot.files[split]
        assert file.read_bytes() == (hub.root / WANTED.repo / file.relative_to(folder)).read_bytes()
    hub.requests.clear()
    remove_file(snapshot.files["train"][0])
    download(WANTED)
    assert [path for path, _ in hub.requests if path.endswith(".parquet")] == [
        snapshot.files["train"][0].relative_to(folder).as_posix()
    ]


def test_a_connection_that_breaks_off_is_taken_up_again(hub):
    COPIES["cifar10"](hub.root)
    hub.cut = 500
    hub.heals = True
    assert damaged(download(WANTED).folder) == []
    assert len([path for path, _ in hub.requests if path.endswith(".parquet")]) == 3


def test_a_file_that_arrives_damaged_is_not_kept(hub):
    COPIES["cifar10"](hub.root)
    hub.damage = True
    with pytest.raises(UserError, match="arrived damaged, its checksum is wrong"):
        download(WANTED)
    assert locate(WANTED) is None
    assert damaged(download(WANTED).folder) == []


def test_damage_on_disk_is_named(hub):
    COPIES["cifar10"](hub.root)
    snapshot = download(WANTED)
    [file] = snapshot.files["test"]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert damaged(snapshot.folder) == [file]
    file.resolve().unlink()
    assert damaged(snapshot.folder) == [file]
    assert locate(WANTED) is None
    remove_file(file)
    assert damaged(download(WANTED).folder) == []
    file.unlink()
    file.write_bytes(b"no link to a blob")
    assert damaged(snapshot.folder) is None


def test_a_file_kept_in_git_is_verified_by_gits_hash(tmp_path):
    # The name is what `git hash-object` prints for this content.
    blob = tmp_path / "fb86a08c4ad269b3d19a5219f5229ed70a080eb4"
    blob.write_text("two words")
    (tmp_path / "train.parquet").symlink_to(blob)
    assert damaged(tmp_path) == []
    blob.write_text("two birds")
    assert damaged(tmp_path) == [tmp_path / "train.parquet"]


def test_what_the_hubs_own_cache_holds_is_used(hub, tmp_path, monkeypatch):
    from huggingface_hub import hf_hub_download

    COPIES["cifar10"](hub.root)
    made = source("cifar10", hub, tmp_path)
    cached = ""
    for split in WANTED.splits:
        name = f"plain_text/{split}-00000-of-00001.parquet"
        file = hf_hub_download(WANTED.repo, name, repo_type="dataset", revision=hub.commit(WANTED.repo))
        cached = str(Path(file).parents[1])
    no_network(monkeypatch)
    asked = len(hub.requests)
    [wanted] = made.repositories()
    assert str(locate(wanted).folder) == cached
    assert damaged(Path(cached)) == []
    data = made.load()
    assert_content("cifar10", data)
    assert len(hub.requests) == asked
    blob = (Path(cached) / "plain_text" / "test-00000-of-00001.parquet").resolve()
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    assert [file.name for file in damaged(Path(cached))] == ["test-00000-of-00001.parquet"]


@pytest.mark.parametrize("revision", ["/dev/zero", "../../etc", "-x", "a b"])
def test_a_revision_is_no_path(hub, tmp_path, revision):
    made = settings_for(tmp_path, "data=cifar10", f"data.revision='{revision}'").data
    with pytest.raises(UserError, match=r"^data.revision=.* is no commit, branch or tag \(a commit; null: the newest"):
        made.load()
    assert not hub.requests


def test_without_a_revision_the_commit_is_told(hub, tmp_path, monkeypatch, caplog):
    COPIES["cifar10"](hub.root)
    made = source("cifar10", hub, tmp_path, "data.revision=null")
    hub.commits[WANTED.repo] = "c" * 40
    with caplog.at_level(logging.INFO, logger="fcl_bench"):
        data = made.load()
    assert data.origin == f"uoft-cs/cifar10 at {'c' * 40}"
    assert "uoft-cs/cifar10 at cccccccc, in " in caplog.text
    no_network(monkeypatch)
    assert source("cifar10", hub, tmp_path, "data.revision=null").load().origin == data.origin


def test_without_a_network_one_line_says_what_to_put_where(hub, tmp_path, monkeypatch):
    no_network(monkeypatch)
    for name, told in (
        (
            "tiny_imagenet",
            r"zh-plus/tiny-imagenet could not be .*\(data\.path=FOLDER with .*train-\*\.parquet and valid-",
        ),
        ("vtab", r"timm/resisc45 could not be .*\(data\.path=FOLDER and FOLDER/resisc45 with .*, revision fe12fc5f"),
    ):
        with pytest.raises(UserError, match=told) as error:
            source(name, hub, tmp_path).load()
        assert "\n" not in str(error.value)
        assert f"fcl-bench-data prepare {name}" in str(error.value)


def test_a_hub_that_lacks_what_is_wanted_is_told(hub, tmp_path):
    with pytest.raises(UserError, match="uoft-cs/cifar10 could not be fetched"):
        download(WANTED)
    COPIES["cifar10"](hub.root)
    with pytest.raises(UserError, match="has no parquet files of the split valid"):
        download(Repository("cifar10", WANTED.repo, None, ("train", "valid")))


def test_a_local_folder_that_lacks_a_file_is_told(hub, tmp_path):
    COPIES["domainnet"](hub.root)
    folder = shutil.copytree(hub.root / "wltjr1007" / "DomainNet", tmp_path / "mine")
    (folder / "data" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match=r"no readable train split: train-00001-of-00002\.parquet is missing"):
        source("domainnet", hub, tmp_path, f"data.path={folder}").load()
    (folder / "data" / "train-00001-of-00002.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(UserError, match=r"one of train-00000-of-00002.parquet to .* is not a readable parquet file"):
        source("domainnet", hub, tmp_path, f"data.path={folder}").load()


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 12), data=st.data())
def test_a_missing_shard_is_found_by_the_others_names(count, data):
    there = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    files = [Path(f"d/train-{number:05d}-of-{count:05d}.parquet") for number in sorted(there)]
    gone = set(range(count)) - there
    assert incomplete(files) == (f"train-{min(gone):05d}-of-{count:05d}.parquet" if gone else None)


def test_parquet_files_tell_their_split():
    splits = ("train", "test")
    for path, split in (
        ("data/train-00000-of-00001.parquet", "train"),
        ("test/test-00004-of-00005.parquet", "test"),
        ("default/train/0000.parquet", "train"),
        ("train.parquet", "train"),
        ("train-00000-of-00001-1359597a978bc4fa.parquet", "train"),
        ("data/trainer.parquet", None),
        ("data/validation-00000-of-00001.parquet", None),
        ("train/readme.md", None),
    ):
        assert split_of(path, splits) == split
    assert split_of("plus/train-00000-of-00001.parquet", ("plus/train", "plus/test")) == "plus/train"
    assert split_of("small/train-00000-of-00001.parquet", ("plus/train", "plus/test")) is None


def test_the_shipped_settings_pin_every_repository(tmp_path):
    for name in COPIES:
        for wanted in settings_for(tmp_path, f"data={name}").data.repositories():
            assert wanted.revision is not None
            assert len(wanted.revision) == 40


def test_any_parquet_data_set_of_the_hub_needs_only_its_names(hub):
    COPIES["cifar10"](hub.root)
    data = HubImages("mine", "uoft-cs/cifar10", "main", "img", "label").load()
    assert data.origin.endswith(hub.commit("uoft-cs/cifar10"))
    assert_content("cifar10", data)
