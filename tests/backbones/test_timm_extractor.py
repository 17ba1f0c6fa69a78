"""The frozen pass over images: the same bits as the plain one, decoded ahead of the network, and how fast."""

from __future__ import annotations

import io
import json
import runpy
import sys
import threading
import time
from collections.abc import Iterator

import datasets
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from fcl_bench.backbones.network_extractor import BATCHES_AHEAD
from fcl_bench.backbones.timm_backbone import Timm, Transform
from fcl_bench.data.images.stored import EncodedImages, Images
from fcl_bench.data.sources.base import Dataset, Split, image_split
from fcl_bench.errors import UserError
from tests.backbones.test_backbones import CPU, NAME
from tests.conftest import REPOSITORY

SIZES = [(32, 32), (60, 41), (41, 60), (200, 170), (32, 32), (9, 14), (170, 180)]


class Listed(Images):
    """Pictures in a list; the first `readable` can be read."""

    fingerprint = "listed"

    def __init__(self, pictures: list[Image.Image], readable: int | None = None) -> None:
        self._pictures = pictures
        self._readable = len(pictures) if readable is None else readable
        self._lock = threading.Lock()
        self.read = 0

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> Image.Image:
        with self._lock:
            self.read += 1
        if index >= self._readable:
            raise UserError(f"{self.describe(index)} cannot be read", "replace it")
        return self._pictures[index]

    def describe(self, index: int) -> str:
        return f"picture {index}"


def pictures(modes: str = "RGB") -> list[Image.Image]:
    rng = np.random.default_rng(0)
    made = [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in SIZES]
    return [picture.convert(modes) for picture in made]


def split_of(images) -> Split:
    return image_split(np.zeros(len(images), dtype=np.int64), images)


def encoded() -> EncodedImages:
    rows = []
    for picture in pictures():
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        rows.append({"bytes": buffer.getvalue(), "path": None})
    features = datasets.Features({"img": datasets.Image(decode=False)})
    return EncodedImages(datasets.Dataset.from_dict({"img": rows}, features=features), "img", "made")


def plain_pass(split: Split, model: torch.nn.Module, config: dict, batch_size: int, start: int) -> torch.Tensor:
    """One image after the other, standardised with three numbers, batch by batch."""
    transform = create_transform(**config, is_training=False, use_prefetcher=True)
    mean, std = (torch.tensor(config[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    model = model.eval().to(memory_format=torch.channels_last)
    features = []
    with torch.no_grad():
        for begin in range(start, len(split), batch_size):
            indices = range(begin, min(begin + batch_size, len(split)))
            pixels = np.stack([np.asarray(transform(split.inputs[index].convert("RGB"))) for index in indices])
            images = torch.from_numpy(pixels).to(torch.float32).div_(255).sub_(mean).div_(std)
            features.append(model(images.contiguous(memory_format=torch.channels_last)))
    return torch.cat(features)


@pytest.mark.parametrize(
    ("batch_size", "workers", "start"), [(1, 1, 0), (2, 5, 0), (3, 2, 2), (4, 1, 1), (5, 2, 6), (7, 3, 0), (16, 4, 0)]
)
@pytest.mark.parametrize("source", ["grey", "encoded"])
def test_features_have_the_bits_of_the_plain_pass(source, batch_size, workers, start):
    split = split_of(Listed(pictures("L")) if source == "grey" else encoded())
    backbone = Timm(NAME, pretrained=False, transform=Transform(size=64))
    data = Dataset("made", split, split)
    extractor = backbone.open(data, CPU)
    extractor.batch, extractor.workers = batch_size, workers
    config = {**resolve_model_data_config(timm.create_model(NAME)), "input_size": (3, 64, 64)}
    expected = plain_pass(split, backbone.trainable(data, 0).build(), config, batch_size, start)
    assert torch.equal(torch.cat(list(extractor.batches(split, start))), expected)


def small_batches(split: Split) -> Iterator[torch.Tensor]:
    """Features of two images at a time, decoded by two threads."""
    backbone = Timm(NAME, pretrained=False, transform=Transform(size=32))
    extractor = backbone.open(Dataset("made", split, split), CPU)
    extractor.batch = extractor.workers = 2
    return extractor.batches(split)


def until(condition, seconds: float = 20.0) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_images_are_decoded_ahead_of_the_network_but_not_all_of_them():
    images = Listed([Image.new("RGB", (8, 8))] * 40)
    batches = small_batches(split_of(images))
    next(batches)
    ahead = 2 * (1 + BATCHES_AHEAD)
    # Nobody asks for the second batch meanwhile.
    assert until(lambda: images.read >= ahead)
    time.sleep(0.1)
    assert images.read == ahead
    batches.close()
    time.sleep(0.1)
    assert images.read == ahead


def test_an_image_that_cannot_be_read_ends_the_pass_with_its_name():
    images = Listed([Image.new("RGB", (8, 8))] * 40, readable=5)
    batches = small_batches(split_of(images))
    assert len(next(batches)) + len(next(batches)) == 4
    with pytest.raises(UserError, match="picture 5 cannot be read"):
        next(batches)
    assert images.read < len(images)


@pytest.mark.slow
def test_the_benchmark_measures_both_sides(tmp_path, monkeypatch, capsys):
    """Its ratio is what it says: of two speeds measured in turn."""
    typed = "--backbone resnet18_32 --device cpu --images webp32 --samples 10 --batch-size 4 --repeats 2"
    monkeypatch.setattr(sys, "argv", ["extraction_throughput.py", *typed.split(), "--out", str(tmp_path)])
    runpy.run_path(str(REPOSITORY / "benchmarks" / "extraction_throughput.py"), run_name="__main__")
    [result] = json.loads((tmp_path / "extraction-resnet18_32-webp32-cpu.json").read_text())["rows"]
    assert (result["samples"], result["batch_size"], result["precision"]) == (10, 4, "float32")
    assert len(result["ratios"]) == 2
    assert result["ratio_median"] == pytest.approx(np.mean(result["ratios"]))
    assert all(result[f"images_per_second.{side}"] > 0 for side in ("bare", "extraction"))
    assert f"{100 * result['ratio_median']:.1f} % of the bare network" in capsys.readouterr().out
