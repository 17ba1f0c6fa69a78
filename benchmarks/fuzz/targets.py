"""Every decoder that is fuzzed, by its name."""

from __future__ import annotations

from benchmarks.fuzz import files, messages
from benchmarks.fuzz.target import Target

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        *(messages.Replies, messages.Frames, messages.Records, messages.Nodes, messages.Codes, messages.Uploads),
        *(files.Features, files.Sites, files.Checkpoints, files.Runs, files.Models, files.SplitFiles, files.Policies),
        *(files.Tables, files.Parquet),
    )
}
