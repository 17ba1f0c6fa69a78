"""Decoding a hub data set's encoded images beside the bare decoder, and beside the data set row by row."""

from __future__ import annotations

import io

import datasets
import pytest
from extraction_throughput import encoded_images
from PIL import Image

from suite.sides import Beside, each, limit, ours, peer, sizes

pytestmark = pytest.mark.usefixtures("cpu_only")


@sizes(
    smoke=[{"what": "webp32", "n": 20}],
    quick=[{"what": "webp32", "n": 1000}, {"what": "jpeg500", "n": 64}],
    full=[{"what": "webp32", "n": 10000}],
)
def bench_decode(case, beside: Beside) -> None:
    images = encoded_images(case.what, case.n).inputs
    encoded = [images._encoded(images._rows[index])[0].as_py() for index in range(case.n)]
    rows = datasets.Dataset.from_dict(
        {"img": [{"bytes": content, "path": None} for content in encoded]},
        features=datasets.Features({"img": datasets.Image()}),
    )

    def bare() -> None:
        for content in encoded:
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP")) as image:
                image.load()

    def by_row() -> None:
        for index in range(len(rows)):
            rows[index]["img"].load()

    def decode() -> None:
        for _ in images.decoded(range(case.n)):
            pass

    beside(
        ours("EncodedImages.decoded", each(decode)),
        limit("Pillow on ready bytes", each(bare)),
        peer("the data set row by row", each(by_row)),
    )
