"""`fcl-bench --help`: every group's choices with one line each, read from the YAML files' first comments."""

from __future__ import annotations

import re
from pathlib import Path

HEAD = """fcl-bench: federated continual learning methods under one split, one ledger and one set of tables

usage: fcl-bench [key=value ...]            one run
       fcl-bench -m [key=value,value ...]   a run for every combination
       fcl-bench predict RUN [DATA]         what the model of a run takes samples for, as a table
       fcl-bench preview=true [key=value]   print and draw the split, run nothing
       fcl-bench-data list|check|prepare    what data sets there are, whether they are here and whole; fetch one
       fcl-tables [--help]                  the runs so far as one table and one figure

examples:
  fcl-bench
  fcl-bench method=fedran method.rank=256 beta=0.5
  fcl-bench data=features data.path=my_features.npz
  fcl-bench data=cifar100 data.path=FOLDER backbone=mobilenetv2 backbone.checkpoint=FILE
  fcl-bench -m method=fedran,stsa,afl seed=0,1,2
  fcl-bench method=fedprotip backbone=tiny
  fcl-bench -m experiment=stsa_scratch_cifar100

options:
  -h, --help         this text
  --version          the version
  -m, --multirun     run every combination of comma-separated values
  --cfg job          print the composed configuration, run nothing
  --hydra-help       Hydra's own options
"""


def usage(conf: Path) -> str:
    """The help text for the configuration in folder `conf`."""
    top = (conf / "config.yaml").read_text()
    defaults = dict(re.findall(r"^  - (\w+): (\w+)$", top, flags=re.MULTILINE))
    parts = [HEAD, "groups (group=choice; the keys of a choice are group.key):"]
    for folder in sorted(entry for entry in conf.iterdir() if entry.is_dir() and entry.name != "hydra"):
        parts.append(f"  {folder.name}")
        files = sorted(folder.glob("*.yaml"))
        width = max(18, *(len(file.stem) for file in files))
        for file in files:
            mark = "*" if file.stem == defaults.get(folder.name) else " "
            parts.append(f"   {mark} {file.stem:<{width}} {_first_comment(file)}")
    parts.append("  (* default; a data set may bring the backbone that suits it)\n")
    parts.append("top-level keys and their defaults:")
    body = top.split("override hydra/job_logging: none\n")[1].split("\nhydra:")[0].strip("\n")
    parts += [f"  {line}".rstrip() for line in body.splitlines()]
    return "\n".join(parts) + "\n"


def _first_comment(file: Path) -> str:
    with file.open() as lines:
        # Hydra's own directive, in an experiment's first line, is no description.
        return next((line[1:].strip() for line in lines if line.startswith("#") and "@package" not in line), "")
