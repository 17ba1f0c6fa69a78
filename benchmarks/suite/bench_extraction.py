"""The frozen pass over encoded images beside the bare network, and beside one image after the other."""

from __future__ import annotations

import timm.data
import torch
from extraction_throughput import backbone_of, bare_pass, encoded_images

from fcl_bench.data.sources.base import Dataset
from suite.sides import Beside, Work, each, limit, ours, peer, sizes


@sizes(
    smoke=[{"what": "resnet18_32", "n": 12}],
    quick=[{"what": "resnet18", "n": 32}],
    full=[{"what": "resnet18", "n": 128}, {"what": "vit_b16", "n": 16}],
    long=[{"what": "vit_b16", "n": 512}],
)
def bench_extraction(case, beside: Beside, device) -> None:
    split = encoded_images("webp32", case.n)
    data = Dataset("webp32", split, split)
    precision = "float16" if device.type == "cuda" else "float32"
    backbone = backbone_of(case.what, precision, None, None)
    extractor = backbone.open(data, device)
    batch = len(next(extractor.batches(split)))

    bare = bare_pass(backbone, data, batch, device, getattr(torch, precision))

    def extract() -> None:
        count = sum(len(features) for features in extractor.batches(split))
        assert count == case.n

    beside(
        ours("Extractor.batches", each(extract)),
        limit("the network on ready batches", each(bare)),
        peer("decoding, then the network, batch by batch", each(plain_pass(backbone, data, device))),
    )


def plain_pass(backbone, data: Dataset, device: torch.device, batch: int = 128) -> Work:
    """Decode and transform a batch in this thread to float32, then run the network on it, all in float32."""
    body = backbone.trainable(data, 0).build().eval().to(device)
    # timm's own transform, as `timm.data.create_transform` of the network's configuration makes it.
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=body), is_training=False)
    images = data.train.inputs

    @torch.no_grad()
    def run() -> None:
        for begin in range(0, len(images), batch):
            ready = [transform(images[index].convert("RGB")) for index in range(begin, min(begin + batch, len(images)))]
            body(torch.stack(ready).to(device)).cpu()

    return run
