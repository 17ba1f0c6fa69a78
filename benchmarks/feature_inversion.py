"""STSA's Table 6 and Figure 10 on a network of ours: images made of what a client with three images of a class sends.

    python -m benchmarks feature_inversion data=cifar100 data.path=CIFAR100 backbone=mobilenetv2 \
        backbone.checkpoint=WEIGHTS.safetensors backbone.transform.size=96 method.M=2560

The attacker knows the network, the projection and the upload, and trains a generator until the network gives its image
the feature that is looked for (deep image prior, Ulyanov et al., 2018): each raw feature; their mean, which STSA-E's
upload without dummy clients tells; and the three features that STSA's Gram matrix gives away (`read_off`). Scores are
means over the images, as in the paper: PSNR in dB, and SSIM; the image of the mean is compared with all three. LPIPS
would need the weights of another network.

Prints a JSON object; --picture FILE draws Figure 10.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import avg_pool2d, interpolate

from fcl_bench.backbones.backbone import Trainable
from fcl_bench.composition import composed
from fcl_bench.config import load_settings
from fcl_bench.methods.closed_form.algebra.random_features import RandomFeatures
from fcl_bench.methods.data_free.generators.images import ImageGenerator

SAMPLES = 3
#: Channels of the generator.
WIDTH = 64


def read_off(G: np.ndarray, sums: np.ndarray, samples: int) -> np.ndarray:
    """The random features H (n, M) behind G = H'H (M, M) and their sum (M,), none of whose entries is negative.

    Separable factorisation: G gives U (M, n) with U U' = G, so that U = H'Q for an orthonormal Q. A row of U over its
    entry of the sum is a convex combination of the rows of Q; where one sample alone is active, it is a row of Q.
    The longest row, then the longest of what is orthogonal to it, and so on, are such rows if each sample has one.
    """
    values, vectors = np.linalg.eigh(G)
    U = vectors[:, -samples:] * np.sqrt(values[-samples:])
    kept = sums > 0.01 * np.median(sums)
    rows = U[kept] / sums[kept, None]
    left, corners = rows.copy(), []
    for _ in range(samples):
        corners.append(int((left**2).sum(1).argmax()))
        direction = left[corners[-1]] / np.linalg.norm(left[corners[-1]])
        left -= np.outer(left @ direction, direction)
    outer, _, inner = np.linalg.svd(rows[corners])
    return (U @ (outer @ inner).T).T


def features_of(H: np.ndarray, P: np.ndarray) -> np.ndarray:
    """(n, d) backbone features z of ReLU(z P), by least squares on the entries that are active."""
    active = [h > 1e-3 * h.max() for h in H]
    return np.stack([np.linalg.lstsq(P[:, a].T, h[a], rcond=None)[0] for h, a in zip(H, active, strict=True)])


class Eye:
    """The attacker's copy of the network: pixels from 0 to 1 (n, 3, h, w) to features (n, d)."""

    def __init__(self, start: Trainable) -> None:
        self.body = start.build().eval().requires_grad_(False)
        self.size = start.size
        self.mean, self.std = (torch.tensor(values).view(1, 3, 1, 1) for values in (start.mean, start.std))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        if pixels.shape[-1] != self.size:
            pixels = interpolate(pixels, (self.size, self.size), mode="bicubic", align_corners=False)
        return self.body((pixels - self.mean) / self.std)


def inverted(eye: Eye, targets: torch.Tensor, side: int, steps: int, seed: int) -> torch.Tensor:
    """Images (n, 3, side, side) of a generator that is trained until their features are `targets` (n, d)."""
    torch.manual_seed(seed)
    generator = ImageGenerator(256, side, width=WIDTH)
    noise = generator.noise(len(targets))
    optimiser = torch.optim.Adam(generator.parameters(), lr=0.01)
    for _ in range(steps):
        errors = (eye(generator(noise)) - targets).square().sum(1) / targets.square().sum(1)
        optimiser.zero_grad()
        errors.sum().backward()
        optimiser.step()
    return generator(noise).detach()


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of images (3, h, w) with pixels from 0 to 1, in dB."""
    return float(-10 * torch.log10((a - b).square().mean()))


def ssim(a: torch.Tensor, b: torch.Tensor) -> float:
    """The mean structural similarity of images (3, h, w) over windows of 7 x 7 pixels."""

    def means(x: torch.Tensor) -> torch.Tensor:
        return avg_pool2d(x[None], 7, stride=1)

    mu_a, mu_b = means(a), means(b)
    var_a, var_b, both = means(a * a) - mu_a**2, means(b * b) - mu_b**2, means(a * b) - mu_a * mu_b
    c1, c2 = 0.01**2, 0.03**2
    found = (2 * mu_a * mu_b + c1) * (2 * both + c2) / ((mu_a**2 + mu_b**2 + c1) * (var_a + var_b + c2))
    return float(found.mean())


def scores(made: torch.Tensor, real: torch.Tensor) -> dict[str, float]:
    """Means over the pairs of images (n, 3, h, w)."""
    pairs = list(zip(made, real, strict=True))
    return {"PSNR": float(np.mean([psnr(*pair) for pair in pairs])), "SSIM": float(np.mean([ssim(*p) for p in pairs]))}


def drawn(rows: dict[str, torch.Tensor], file: Path) -> None:
    """One row of images for each name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(rows), SAMPLES, figsize=(SAMPLES * 1.3 + 1.6, len(rows) * 1.35), squeeze=False)
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        for number, axis in enumerate(line):
            axis.axis("off")
            if number < len(pictures):
                axis.imshow(pictures[number].permute(1, 2, 0).clamp(0, 1).numpy())
        line[0].text(-0.1, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    figure.savefig(file, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as of fcl-bench: data, backbone, method.M, seed")
    parser.add_argument("--label", type=int, default=0, help="the class of the three images (CIFAR-100: 0 is apple)")
    parser.add_argument("--steps", type=int, default=400, help="of the generator, for each image")
    parser.add_argument("--picture", type=Path, help="where Figure 10 is drawn")
    arguments = parser.parse_args()

    settings = load_settings(composed(["method=stsa", *arguments.overrides]))
    data = settings.data.load()
    start = settings.backbone.trainable(data, settings.scalars.seed)
    chosen = np.flatnonzero(data.train.labels == arguments.label)[:SAMPLES]
    pixels = np.stack([np.asarray(data.train.inputs[index]) for index in chosen])
    real = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    eye = Eye(start)
    raw = eye(real)

    projection = RandomFeatures(0, start.dimension, settings.method.M, torch.float64, torch.device("cpu")).projection
    P = projection.numpy()
    H = np.maximum(raw.numpy().astype(np.float64) @ P, 0)
    G, C = ((H.T @ H).astype(np.float32), H.sum(0).astype(np.float32))  # as they travel
    found = features_of(read_off(G.astype(np.float64), C.astype(np.float64), SAMPLES), P)
    distances = (
        np.linalg.norm(raw.numpy()[:, None] - found[None], axis=2) / np.linalg.norm(raw.numpy(), axis=1)[:, None]
    )
    own = torch.from_numpy(found[distances.argmin(1)]).float()

    def images(targets: torch.Tensor) -> torch.Tensor:
        return inverted(eye, targets, real.shape[-1], arguments.steps, settings.scalars.seed)

    of_raw, of_mean, of_gram = images(raw), images(raw.mean(0, keepdim=True)), images(own)
    report = {
        "raw feature": scores(of_raw, real),
        "STSA-E, their mean": scores(of_mean.expand_as(real), real),
        "STSA, features read off G": scores(of_gram, real),
        "a grey image": scores(torch.full_like(real, 0.5), real),
        "relative error of the features read off": float(distances.min(1).max()),
        "steps": arguments.steps,
    }
    print(json.dumps(report, indent=2))
    if arguments.picture:
        names = ("the images", "raw features", "STSA-E: their mean", "STSA: read off G")
        drawn(dict(zip(names, (real, of_raw, of_mean, of_gram), strict=True)), arguments.picture)


if __name__ == "__main__":
    main()
