"""`fcl-bench-data`: what it prints, what it finds, how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from PIL import Image

from fcl_bench.cli.data import main
from fcl_bench.data.sources.hub import download
from tests.data.fake_hub import FakeHub
from tests.data.hub_copies import COPIES
from tests.small_runs import settings_for


@pytest.fixture
def call(in_process):
    """`fcl-bench-data` in this process: arguments -> (exit code, stdout, stderr)."""
    return partial(in_process, main, "fcl-bench-data")


def pinned(hub: FakeHub, tmp_path, name: str) -> None:
    """The copy of data set `name`, at the commits that its YAML names."""
    COPIES[name](hub.root)
    for wanted in settings_for(tmp_path, f"data={name}").data.repositories():
        hub.commits[wanted.repo] = wanted.revision


@pytest.mark.slow
def test_the_list_tells_size_licence_revision_and_presence(call, hub, tmp_path):
    pinned(hub, tmp_path, "cifar10")
    code, out, err = call("list")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: " ".join(line.split()) for line in out.splitlines()}
    assert lines["cifar10"].startswith("cifar10 10 50,000 10,000 144.0 MB no uoft-cs/cifar10 0b271498 none stated")
    assert lines["domainnet"].startswith("domainnet 345 60,000 176,743 18.5 GB no wltjr1007/DomainNet ee20570a fair")
    assert lines["digits"].startswith("digits 10 1,442 355 yes")
    assert lines["imagefolder"] == "imagefolder data.path=..."
    assert lines["vtab"].startswith("vtab 50 4.8 GB no timm/resisc45, tanganke/dtd,")
    assert hub.requests == []
    pinned(hub, tmp_path, "vtab")
    download(settings_for(tmp_path, "data=cifar10").data.repositories()[0])
    download(settings_for(tmp_path, "data=vtab").data.repositories()[0])
    again = " ".join(call("list")[1].split())
    assert " yes uoft-cs/cifar10 " in again
    assert " 1 of 5 timm/resisc45, " in again


@pytest.mark.slow_cases("vtab")
@pytest.mark.parametrize("name", ["tiny_imagenet", "imagenet_r", "vtab"])
def test_prepare_brings_everything_a_run_needs(call, hub, tmp_path, monkeypatch, name):
    pinned(hub, tmp_path, name)
    code, out, err = call("prepare", name)
    assert code == 0, err
    assert f"fcl-bench-data: data {name}: downloading " in out
    assert f"data={name} is ready: " in out
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert len(settings_for(tmp_path, f"data={name}").data.load().train) > 0
    asked = len(hub.requests)
    code, out, _ = call("prepare", name)
    assert (code, len(hub.requests)) == (0, asked)
    assert "downloading" not in out


def test_prepare_mends_a_damaged_file(call, hub, tmp_path):
    pinned(hub, tmp_path, "cifar10")
    call("prepare", "cifar10")
    [file] = (tmp_path / "home" / "hub").rglob("test-*.parquet")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, _, err = call("prepare", "cifar10")
    assert code == 0
    assert f"{file} is damaged and will be downloaded again" in err
    assert file.read_bytes() == content


WRONG = [
    ("", "the following arguments are required: COMMAND (fcl-bench-data --help"),
    ("fetch", "invalid choice: 'fetch'"),
    ("prepare", "the following arguments are required: NAME"),
    ("prepare cifar11", "data=cifar11 is not known (did you mean cifar10 or cifar100?"),
    ("prepare cifar10 method=stsa", "method=stsa is no key of data (data.KEY=VALUE, such as data.path=FOLDER)"),
    ("prepare cifar10 data.pth=x", "unknown key data.pth (did you mean data.path"),
    ("prepare domainnet data.per_domain=0", "data.per_domain=0 is out of range"),
    ("prepare digits data.path", "data.path is not key=value"),
    ("prepare cifar10 data.path={}/none", "data.path={}/none does not exist"),
    ("prepare imagefolder", "data=imagefolder needs data.path"),
    ("list all", "unrecognized arguments: all"),
    ("prepare digits --fast", "unrecognized arguments: --fast"),
]


@pytest.mark.parametrize(("typed", "told"), WRONG, ids=[typed for typed, _ in WRONG])
def test_wrong_arguments_are_one_line_and_exit_2(call, tmp_path, typed, told):
    code, _, err = call(*typed.format(tmp_path).split())
    assert code == 2
    [line] = err.splitlines()
    assert line.startswith("fcl-bench-data: error: ")
    assert told.format(tmp_path) in line


@pytest.mark.slow
def test_the_command_downloads_from_the_address_in_the_environment(hub, tmp_path):
    """In a process of its own, as a user's: only HF_ENDPOINT tells it of another hub."""
    pinned(hub, tmp_path, "cifar10")
    variables = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "fcl_bench.cli.data", "prepare", "cifar10"],
        capture_output=True,
        text=True,
        env={**variables, "NO_PROXY": "127.0.0.1", "HF_DATASETS_CACHE": str(tmp_path / "arrow")},
    )
    assert done.returncode == 0, done.stderr
    assert "data=cifar10 is ready: 4 training and 3 test samples" in done.stdout
    assert "data cifar10: file 2 of 2, " in done.stdout


@pytest.mark.slow
def test_a_run_goes_from_the_hub_to_a_result(hub, tmp_path):
    from tests.small_runs import run_in

    COPIES["vtab"](hub.root)
    pinned(hub, tmp_path, "vtab")
    outcome = run_in(
        tmp_path / "out", "data=vtab", "backbone=pixels", "method=afl", "clients=2", "partition.min_size=0"
    )
    assert outcome.record["data"] == "vtab"
    assert len(outcome.record["metrics"]["accuracy"]) == 5
    with np.load(outcome.folder / "partition.npz") as partition:
        assert partition["class_order"].tolist() == list(range(50))


def test_pictures_of_any_kind_are_my_own_data(tmp_path):
    """Seven unequal classes; spaces and other alphabets; grey, RGBA, palette and 16-bit images of several sizes."""
    from tests.small_runs import run_in

    root = write_own_images(tmp_path / "my pictures")
    outcome = run_in(
        tmp_path / "out",
        "data=imagefolder",
        f"data.path='{root}'",
        "backbone=pixels",
        "backbone.size=8",
        "method=afl",
        "tasks=3",
        "clients=2",
        "partition.min_size=0",
    )
    assert len(outcome.record["metrics"]["accuracy"]) == 3
    with np.load(outcome.folder / "partition.npz") as partition:
        assert sorted(partition["class_order"]) == list(range(7))
        dealt = [partition[name] for name in partition.files if name.startswith("train_t")]
    assert sorted(np.concatenate(dealt)) == list(range(sum(4 + 3 * k for k in range(7))))


def test_an_unreadable_picture_in_the_middle_is_named(tmp_path):
    from fcl_bench.errors import UserError
    from tests.small_runs import run_in

    root = write_own_images(tmp_path / "my pictures")
    broken = sorted((root / "train" / "猫 und Hund").iterdir())[3]
    broken.write_bytes(broken.read_bytes()[:30])
    keys = ("data=imagefolder", f"data.path='{root}'", "backbone=pixels", "backbone.size=8", "method=afl")
    with pytest.raises(UserError) as error:
        run_in(tmp_path / "out", *keys, "tasks=3", "clients=2", "partition.min_size=0")
    assert str(broken) in str(error.value)
    assert "\n" not in str(error.value)


def write_own_images(root):
    """Class k has 4 + 3 k training and 2 + k test images, all of about one colour of its own."""
    names = ("a cat", "Katze ß", "猫 und Hund", "собака", "الطير", "x_y-z", "7")
    for k, name in enumerate(names):
        for side, count in (("train", 4 + 3 * k), ("test", 2 + k)):
            rng = np.random.default_rng((k, count))
            (root / side / name).mkdir(parents=True)
            for number in range(count):
                size = (int(rng.integers(6, 20)), int(rng.integers(6, 20)))
                save_own_image(root / side / name, number, kind=(k + number) % 5, level=20 + 35 * k, size=size)
    return root


def save_own_image(folder, number: int, kind: int, level: int, size: tuple[int, int]) -> None:
    noise = np.random.default_rng(number).integers(-6, 7, size)
    grey = (level + noise).astype(np.uint8)
    if kind == 0:
        Image.fromarray(grey).save(folder / f"{number} grey.png")
    elif kind == 1:
        Image.fromarray(np.stack([grey, grey, grey, np.full_like(grey, 255)], axis=2)).save(folder / f"{number}.png")
    elif kind == 2:
        Image.fromarray(grey.astype(np.uint16) * 257).save(folder / f"{number} deep.tiff")
    elif kind == 3:
        Image.fromarray(np.stack([grey] * 3, axis=2)).save(folder / f"{number}.JPG", quality=95)
    else:
        Image.fromarray(grey).convert("P").save(folder / f"{number}.gif")
