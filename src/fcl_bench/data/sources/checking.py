"""Check that a data set on this machine is complete and undamaged."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fcl_bench.data.sources.base import Dataset, Source, Split
from fcl_bench.data.sources.hub import damaged, locate, not_here
from fcl_bench.errors import UserError
from fcl_bench.files import user_path
from fcl_bench.tracking.console import progress


@dataclass
class Findings:
    """What a check found to be right and to be wrong, one line per finding."""

    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def check(source: Source) -> Findings:
    """Check the files, their checksums and the counts, and decode every image. Downloads nothing."""
    findings = Findings()
    _check_files(source, findings)
    if findings.wrong:
        return findings
    try:
        dataset = source.load()
    except UserError as error:
        findings.wrong.append(str(error))
        return findings
    _check_counts(source, dataset, findings)
    if not dataset.holds_features:
        bad = [line for split in (dataset.train, dataset.test) for line in _unreadable(split)]
        findings.wrong += bad
        if not bad:
            findings.right.append("every image can be decoded")
    return findings


def _check_files(source: Source, findings: Findings) -> None:
    """Check that the hub's files are present and have the right checksums."""
    folders = []
    for wanted in source.repositories():
        found = locate(wanted)
        if found is None:
            findings.wrong.append(str(not_here(wanted, "is not on this machine")))
        else:
            folders.append(found.folder)
    path = getattr(source, "path", None)
    if path is not None and user_path("data.path", path).is_dir():
        folders.append(user_path("data.path", path))
    for folder in folders:
        bad = damaged(folder)
        if bad is None:
            findings.right.append(f"no checksums are known for {folder}")
        elif bad:
            findings.wrong += [f"{file} is missing or damaged: its checksum is wrong" for file in bad]
        else:
            findings.right.append(f"the checksums in {folder} are right")


def _check_counts(source: Source, dataset: Dataset, findings: Findings) -> None:
    facts = source.about
    classes = len(np.unique(dataset.train.labels))
    train, test = len(dataset.train), len(dataset.test)
    wrong = len(findings.wrong)
    if untested := len(np.setdiff1d(dataset.train.labels, dataset.test.labels)):
        findings.right.append(f"but {untested} classes have no test sample and count in no accuracy")
    if unseen := len(np.setdiff1d(dataset.test.labels, dataset.train.labels)):
        findings.wrong.append(f"{unseen} classes of the test set have no training sample")
    if source.whole():
        if facts.classes is not None and classes != facts.classes:
            findings.wrong.append(f"{classes} classes, not {facts.classes}")
        # Only the sum is compared: if the train/test cut is a rule of ours, each side's size depends on rounding.
        if facts.train is not None and facts.test is not None and train + test != facts.train + facts.test:
            findings.wrong.append(f"{train + test:,} samples, not {facts.train + facts.test:,}")
    if len(findings.wrong) == wrong:
        findings.right.append(f"{classes} classes, {train:,} training and {test:,} test samples")


def _unreadable(split: Split) -> list[str]:
    """One line for each image that can't be decoded."""
    images = split.inputs
    assert not isinstance(images, np.ndarray)
    lines = []
    with progress(len(images), "decoding", "image") as bar:
        for index in range(len(images)):
            try:
                images[index]
            except UserError as error:
                lines.append(error.what)
            bar.update()
    return lines
