"""The feature cache: keyed, whole or absent, resumable, shared."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from fcl_bench.backbones import extract
from fcl_bench.backbones.extract import FeatureCache
from fcl_bench.errors import UserError
from fcl_bench.files import json_hash

KEY = {"weights": "w", "transform": "t", "precision": "float32", "data": "d"}
FEATURES = torch.arange(60.0).reshape(20, 3)


class Backbone:
    """Yields FEATURES in batches of 4; counts them; can fail before a given sample."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.extracted: list[int] = []

    def __call__(self, start: int):
        for begin in range(start, 20, 4):
            if self.fail_at is not None and begin >= self.fail_at:
                raise KeyboardInterrupt
            self.extracted.append(begin)
            yield FEATURES[begin : begin + 4]


def get(folder: Path, backbone: Backbone, key: dict[str, str] = KEY):
    return FeatureCache(folder).get("made", key, 20, backbone)


def test_the_second_call_reads_what_the_first_extracted(tmp_path):
    first, second = Backbone(), Backbone()
    made, found = get(tmp_path, first), get(tmp_path, second)
    assert (made.hit, found.hit) == (False, True)
    assert second.extracted == []
    assert torch.equal(made.features, FEATURES)
    assert torch.equal(found.features, FEATURES)
    assert found.seconds == 0
    assert found.cost == made.cost == made.seconds > 0


@pytest.mark.parametrize("part", list(KEY))
def test_anything_that_determines_features_changes_the_key(tmp_path, part):
    get(tmp_path, Backbone())
    assert not get(tmp_path, Backbone(), {**KEY, part: "other"}).hit


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text"])
def test_a_damaged_file_is_noticed_and_redone(tmp_path, damage, caplog):
    get(tmp_path, Backbone())
    [file] = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes({"truncate": content[:-8], "flip": content, "empty": b"", "text": b"hello"}[damage])
    again = Backbone()
    found = get(tmp_path, again)
    assert not found.hit
    assert torch.equal(found.features, FEATURES)
    assert len(again.extracted) == 5
    assert "extracting again" in caplog.text
    assert get(tmp_path, Backbone()).hit


def test_an_interrupted_extraction_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(extract, "SECONDS_PER_CHUNK", 0.0)
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, Backbone(fail_at=12))
    assert not list(tmp_path.glob("*.safetensors"))
    again = Backbone()
    found = get(tmp_path, again)
    assert again.extracted == [12, 16]
    assert torch.equal(found.features, FEATURES)
    assert found.cost > found.seconds
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("metadata", [None, {"checksum": "x"}, {"checksum": "x", "seconds": "soon"}])
def test_a_file_of_another_make_is_redone(tmp_path, metadata):
    from safetensors.torch import save_file

    get(tmp_path, Backbone())
    [file] = tmp_path.glob("*.safetensors")
    save_file({"features": FEATURES}, file, metadata=metadata)
    assert not get(tmp_path, Backbone()).hit


def test_a_damaged_chunk_costs_only_what_follows_it(tmp_path, monkeypatch):
    monkeypatch.setattr(extract, "SECONDS_PER_CHUNK", 0.0)
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, Backbone(fail_at=16))
    chunks = sorted(tmp_path.glob("*.partial/*.safetensors"))
    chunks[2].write_bytes(b"damaged")
    again = Backbone()
    assert torch.equal(get(tmp_path, again).features, FEATURES)
    assert again.extracted == [8, 12, 16]


def test_features_of_another_key_are_not_taken_for_these(tmp_path, caplog):
    """A file that was copied or renamed: its own checksum is right."""
    other = {**KEY, "weights": "others"}
    get(tmp_path, Backbone(), other)
    get(tmp_path, Backbone())
    [theirs, ours] = [tmp_path / f"made-{json_hash(key)}.safetensors" for key in (other, KEY)]
    shutil.copy(theirs, ours)
    again = Backbone()
    assert not get(tmp_path, again).hit
    assert again.extracted
    assert "are of other data or another backbone; extracting again" in caplog.text
    assert get(tmp_path, Backbone()).hit


@pytest.mark.parametrize("moved", ["from another place", "from another key"])
def test_a_chunk_of_something_else_is_not_taken_over(tmp_path, monkeypatch, moved):
    monkeypatch.setattr(extract, "SECONDS_PER_CHUNK", 0.0)
    for key in (KEY, {**KEY, "data": "other"}):
        with pytest.raises(KeyboardInterrupt):
            get(tmp_path, Backbone(fail_at=12), key)
    ours, theirs = (tmp_path / f"made-{json_hash(key)}.partial" for key in (KEY, {**KEY, "data": "other"}))
    source = ours / "0000000000.safetensors" if moved == "from another place" else theirs / "0000000004.safetensors"
    shutil.copy(source, ours / "0000000004.safetensors")
    again = Backbone()
    assert torch.equal(get(tmp_path, again).features, FEATURES)
    assert again.extracted == [4, 8, 12, 16]


def test_a_special_file_in_the_cache_is_not_opened(tmp_path, caplog):
    os.mkfifo(tmp_path / f"made-{json_hash(KEY)}.safetensors")
    assert not get(tmp_path, Backbone()).hit
    assert "it is a FIFO" in caplog.text
    assert get(tmp_path, Backbone()).hit


def test_a_backbone_that_skips_samples_is_an_error_not_a_cache_entry(tmp_path):
    with pytest.raises(UserError, match=r"gave 8 rows for the 20 samples of .* \(one for each\)"):
        get(tmp_path, lambda start: iter([FEATURES[:8]]))
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_killed_process_leaves_no_litter_for_long(tmp_path):
    get(tmp_path, Backbone())
    [file] = tmp_path.glob("*.safetensors")
    file.unlink()
    litter = file.with_name(f".{file.stem}-abcd{file.suffix}")
    litter.write_bytes(b"half")
    get(tmp_path, Backbone())
    assert not litter.exists()


def _slow_extraction(folder: Path, log: Path) -> None:
    def batches(start: int):
        for begin in range(start, 20, 4):
            with log.open("a") as file:
                file.write(f"{begin}\n")
            time.sleep(0.1)
            yield FEATURES[begin : begin + 4]

    found = FeatureCache(folder).get("made", KEY, 20, batches)
    assert torch.equal(found.features, FEATURES)


@pytest.mark.slow
def test_parallel_runs_extract_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    workers = [context.Process(target=_slow_extraction, args=(tmp_path / "cache", log)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert log.read_text().split() == ["0", "4", "8", "12", "16"]
