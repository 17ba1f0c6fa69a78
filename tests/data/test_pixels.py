"""A split as one tensor of pixels: the same bytes as Pillow's, whatever the images are kept in."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import functional

from fcl_bench.data.images import batches
from fcl_bench.data.images.batches import load_pixels
from fcl_bench.data.images.stored import ArrayImages, EncodedImages, FileImages
from fcl_bench.data.sources.base import Split, image_split
from fcl_bench.errors import UserError


def split_of(images) -> Split:
    return image_split(np.zeros(len(images)), images)


def by_pillow(images) -> torch.Tensor:
    converted = [np.array(images[index].convert("RGB")) for index in range(len(images))]
    return torch.from_numpy(np.stack(converted)).permute(0, 3, 1, 2)


def random_image(mode: str, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 2**16, size, dtype=np.uint16))
    return Image.fromarray(rng.integers(0, 256, (*size, 4), dtype=np.uint8)).convert(mode)


def encoded_images(contents: list[bytes]) -> EncodedImages:
    import datasets

    features = datasets.Features({"img": datasets.Image(decode=False)})
    rows = {"img": [{"bytes": content, "path": None} for content in contents]}
    return EncodedImages(datasets.Dataset.from_dict(rows, features=features), "img", "made")


def content_of(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 5),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    colour=st.booleans(),
    seed=st.integers(0, 99),
)
def test_arrays_keep_their_pixels(n, height, width, colour, seed):
    shape = (n, height, width, 3) if colour else (n, height, width)
    images = ArrayImages(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))
    loaded = load_pixels(split_of(images), 9)
    assert loaded.dtype == torch.uint8
    assert loaded.is_contiguous()
    assert torch.equal(loaded, by_pillow(images))


@pytest.mark.parametrize("side", [7, 40])
def test_files_of_all_modes_keep_their_pixels(tmp_path, side):
    rng = np.random.default_rng(0)
    kinds = [("RGB", "png"), ("RGBA", "png"), ("LA", "png"), ("L", "png"), ("P", "gif"), ("1", "png"), ("I;16", "tiff")]
    kinds += [("I;16", "png"), ("CMYK", "jpg"), ("L", "jpg"), ("RGB", "webp"), ("RGB", "bmp"), ("L", "pgm")]
    files = []
    for number, (mode, suffix) in enumerate(kinds):
        files.append(tmp_path / f"{number}.{suffix}")
        random_image(mode, (side, side - 1), rng).save(files[-1])
    images = FileImages(tmp_path, files)
    loaded = load_pixels(split_of(images), side)
    assert loaded.shape == (len(kinds), 3, side, side - 1)
    assert torch.equal(loaded, by_pillow(images))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("side", [5, 40])
def test_encoded_images_keep_their_pixels_and_order(kind, side):
    rng = np.random.default_rng(1)
    images = encoded_images([content_of(random_image("RGB", (side, side), rng), kind) for _ in range(150)])
    assert torch.equal(load_pixels(split_of(images), 64), by_pillow(images))
    assert images[-1].tobytes() == images[149].tobytes()
    with pytest.raises(IndexError):
        images[150]


@pytest.mark.parametrize("first", [(16, 16), (30, 20)])
def test_images_of_several_sizes_are_resized_and_cropped_to_one(first):
    """As torchvision does it in two steps, for sides that it need not round; Pillow may swap its passes."""
    rng = np.random.default_rng(2)
    sizes = [(16, 16), (8, 16), (32, 16), (8, 8), (40, 8), (4, 2)]
    raw = [Image.fromarray(rng.integers(64, 192, (*shape, 3), dtype=np.uint8)) for shape in sizes]
    images = encoded_images([content_of(image, "PNG") for image in [random_image("L", first, rng), *raw]])
    loaded = load_pixels(split_of(images), 16)
    assert loaded.shape == (7, 3, 16, 16)
    for image, got in zip(raw, loaded[1:], strict=True):
        resized = functional.resize(image, 16, functional.InterpolationMode.BICUBIC)
        wanted = functional.pil_to_tensor(functional.center_crop(resized, [16, 16]))
        torch.testing.assert_close(got, wanted, atol=1, rtol=0)


def test_images_above_the_size_are_resized_although_they_are_all_alike():
    pixels_ = np.random.default_rng(3).integers(0, 256, (3, 24, 16), dtype=np.uint8)
    loaded = load_pixels(split_of(ArrayImages(pixels_)), 16)
    assert torch.equal(loaded, torch.from_numpy(pixels_)[:, None, 4:20].expand(3, 3, 16, 16))


def test_threads_do_not_change_the_pixels(monkeypatch):
    rng = np.random.default_rng(4)
    images = encoded_images([content_of(random_image("RGB", (6, 6), rng), "PNG") for _ in range(300)])
    one = load_pixels(split_of(images), 8)
    monkeypatch.setattr(batches, "_TINY", 0)
    monkeypatch.setattr(batches, "available_cores", lambda: 7)
    assert torch.equal(load_pixels(split_of(images), 8), one)


def test_no_images_make_an_empty_tensor():
    assert load_pixels(split_of(ArrayImages(np.zeros((0, 8, 8)))), 8).shape == (0, 3, 8, 8)


@pytest.mark.parametrize("side", [8, 40])
def test_of_several_unreadable_images_the_first_is_named(side):
    contents = [content_of(Image.new("RGB", (side, side)), "PNG")] * 200
    contents[70] = contents[130] = b"not an image"
    with pytest.raises(UserError, match="made row 70 cannot be read: not an image"):
        load_pixels(split_of(encoded_images(contents)), 64)


def test_more_pixels_than_the_machine_has_memory_for_are_refused_before_they_are_decoded():
    class Many:
        fingerprint = "many"

        def __len__(self):
            return 10**9

        def __getitem__(self, index):
            assert index == 0
            return Image.new("RGB", (64, 64))

    split = Split(np.zeros(1), Many(), "many")
    with pytest.raises(UserError, match=r"data=many needs .* GiB for 1000000000 images of 64 x 64 pixels"):
        load_pixels(split, 64, what="data=many")
    with pytest.raises(UserError, match="32 x 32 pixels"):
        load_pixels(split, 32)
