"""What is known about a data set before a byte of it is here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class About:
    """Facts for a reader and for `fcl-bench-data`; none of them changes a result.

    Args:
        classes: number of classes.
        train, test: number of images on each side, before any subset is taken; None: not known beforehand.
        megabytes: size of the download (10^6 bytes); None: there is none, or it is not known.
        licence: a note on the terms of use.
    """

    classes: int | None = None
    train: int | None = None
    test: int | None = None
    megabytes: int | None = None
    licence: str = ""
