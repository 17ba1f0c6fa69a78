"""Noise of a real site, which the server cannot subtract: discrete Gaussians on a grid, under a secret of the site.

**Its key** follows from all 32 bytes of the secret and from all that an upload depends on (keyed BLAKE2b): the same
upload has the same noise, and one of other samples, settings or another broadcast has other noise.

**Why it is private.** x travels as gamma (round(x / gamma) + Z), gamma = sigma / R, Z of N_Z(0, R^2), R = 2^31:

1. For every real x and s, sum_k exp(-(k - x)^2 / (2 s^2)) = s sqrt(2 pi) (1 +- kappa), by Poisson's formula, with
   kappa = 2 sum_{j>0} exp(-2 pi^2 s^2 j^2). So N_Z(0, R^2) is, to a factor within (1 +- kappa)^2 of each probability,
   the law of a real Gaussian of variance R^2 - s^2 that is rounded at random, with weights exp(-(k - x)^2 / (2 s^2))
   (Peikert 2010, Thm. 3.1). This rounding commutes with shifts by integers, so what travels is made of what the
   *Gaussian mechanism* gives, and as private as that, in any number of dimensions: for s = 3 that is kappa < 10^-76,
   and sqrt(R^2 - 9) for R. (In one dimension: Canonne, Kamath and Steinke 2020, Thm. 7.)
2. |round(a) - round(b)| <= |a - b| + 1: rounding n numbers adds sqrt(n) steps to the sensitivity.
3. Sums of m samples with |h| <= 1 round by m (m + 2) u sqrt(2) at most, over a whole upload; norms of n numbers by n u.

So the noise of multiplier z is made wider by (1 + f) / (1 - z sqrt(n) / R), f = 2 u (m (m + 2) + n + 4), u = 2^-53, and
epsilon is that of z. The sampler's distance from its law adds n 2^-113 (1 + e^epsilon) to delta.
"""

from __future__ import annotations

import hashlib
import math

import torch

from fcl_bench.engine.blob import packed
from fcl_bench.errors import UserError, installing
from fcl_bench.linalg import structure
from fcl_bench.linalg.discrete_gaussian import SCALE, Words, discrete_gaussian
from fcl_bench.options.noise.mechanism import SimulatedNoise, Source
from fcl_bench.protocol.message import Message

#: Bytes of a site's secret, and of every key that follows from it.
KEY = 32
#: u; how much wider the noise may become; the largest multiple of the step.
_UNIT, _MOST_WIDENED, _LARGEST = 2.0**-53, 1.01, 2.0**62


def secret(key: bytes, multiplier: float, samples: int = 0) -> Source:
    """Return the source of one site in one run.

    Args:
        key: of `KEY` bytes.
        multiplier: z, noise over sensitivity.
        samples: m, the most of which an upload has sums; 0: uploads are models.
    """
    try:
        from fcl_bench.options.secure.masks import key_words
    except ModuleNotFoundError as error:
        raise UserError(
            "noise=gaussian: cryptography is not installed, which draws the noise of a site", installing("privacy")
        ) from error

    def noise(upload: Message, client: int, broadcast: Message | None) -> SecretNoise:
        own = hashlib.blake2b(packed(upload, client=client), digest_size=KEY, key=key)
        own.update(b"" if broadcast is None else packed(broadcast))
        numbers = sum(tensor.numel() for tensor in upload.values())
        return SecretNoise(key_words(own.digest()), widening(multiplier, numbers, samples))

    return noise


def widening(multiplier: float, numbers: int, samples: int) -> float:
    """Return the factor of the noise that pays for the rounding of an upload of n numbers, sums of m samples.

    Raises:
        UserError: it would be above 1.01.
    """
    share = multiplier * math.sqrt(numbers) / SCALE
    rounded = 2 * _UNIT * (samples * (samples + 2) + numbers + 4)
    found = (1 + rounded) / (1 - share) if share < 1 else math.inf
    if found > _MOST_WIDENED:
        raise UserError(
            f"noise=gaussian: what {numbers} numbers of {samples} samples round away may tell more than noise of the"
            f" multiplier {multiplier:.3g} hides",
            "fewer samples per task and site, or a smaller noise.multiplier",
        )
    return found


class SecretNoise(SimulatedNoise):
    """Noise of one upload: whole steps, on numbers that are rounded to whole steps.

    Args:
        words: the key stream.
        widening: factor of all deviations.
    """

    def __init__(self, words: Words, widening: float) -> None:
        self._words, self._widening = words, widening

    def on(
        self, values: torch.Tensor, deviation: float, symmetric: bool = False, start: torch.Tensor | None = None
    ) -> torch.Tensor:
        numbers = values.detach().double().cpu()
        step = torch.full_like(numbers, self._widening * deviation / SCALE)
        if symmetric:
            # The lower triangle may be rounded in another way, and would then tell what the noise hides.
            numbers = structure.packed(numbers)
            step = structure.packed((step / math.sqrt(2)).diagonal_scatter(step.diagonal()))
        multiples = numbers.div(step).round_() if deviation else numbers
        if not bool((multiples.abs() <= _LARGEST).all()):
            raise UserError(
                "an upload holds numbers that are not finite, or too large for the steps of its noise",
                "finite features, or a larger noise.multiplier",
            )
        if deviation:
            drawn = torch.from_numpy(discrete_gaussian(self._words, numbers.numel())).view_as(numbers)
            numbers = (multiples.long() + drawn).double() * step
        numbers = (structure.symmetric(numbers) if symmetric else numbers).to(values.device)
        return numbers if start is None else start + numbers
