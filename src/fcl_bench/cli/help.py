"""`fcl-bench --help`: one line per choice of every group, read from the YAML files' first comments."""

from __future__ import annotations

from fcl_bench.cli.knobs import default_choices, read_choice, settings_text
from fcl_bench.composition import choices_of, groups

HEAD = """fcl-bench: federated continual learning methods under one split, one ledger and one set of tables

usage: fcl-bench [key=value ...]            one run
       fcl-bench -m [key=value,value ...]   a run for every combination
       fcl-bench predict RUN [DATA]         a table of the classes that a run's model predicts for samples
       fcl-bench leaderboard run|show TRACK every method of a track under one protocol: its rows, table and page
       fcl-bench rank RUN [...]             where runs of one's own stand among a track's rows
       fcl-bench runs verify|sign RUN [...] recompute what runs say from what they store; sign their records
       fcl-bench preview=true [key=value]   print and draw the split, run nothing
       fcl-bench show [group[=choice]|key]  what can be chosen; the keys, paper and cost of one choice
       fcl-bench tune key=RANGE [...]       search keys for the best result (see `fcl-bench tune --help`)
       fcl-bench-data list|check|prepare    list the data sets, check the files that are here, download one
       fcl-tables [--help]                  the runs so far as one table and one figure
       fcl-bench-node clients=0,1 [...]     serve clients of runs with transport=flower on this machine

examples:
  fcl-bench
  fcl-bench method=fedran method.rank=256 beta=0.5
  fcl-bench data=features data.path=my_features.npz
  fcl-bench data=cifar100 data.path=FOLDER backbone=mobilenetv2 backbone.checkpoint=FILE
  fcl-bench -m method=fedran,stsa,afl seed=0,1,2
  fcl-bench method=fedprotip backbone=tiny
  fcl-bench -m experiment=stsa_scratch_cifar100

options:
  -h, --help         this text; after method=NAME or another choice, its keys
  --version          the version
  -m, --multirun     run every combination of comma-separated values
  --cfg job          print the composed configuration, run nothing
  --hydra-help       Hydra's own options
  -sc install=bash   print code that lets the shell complete keys and choices: eval "$(fcl-bench -sc install=bash)"
"""


def usage() -> str:
    """The help text."""
    parts = [
        HEAD,
        "groups (group=choice; the keys of a choice are group.key, `fcl-bench show group=choice` lists them):",
    ]
    for group in groups():
        parts.append(f"  {group}")
        names = choices_of(group)
        width = max(18, *map(len, names))
        for name in names:
            mark = "*" if name == default_choices().get(group) else " "
            parts.append(f"   {mark} {name:<{width}} {read_choice(group, name).description}")
    parts.append("  (* default; a data set may bring the backbone that suits it)\n")
    parts.append("top-level keys and their defaults:")
    parts += [f"  {line}".rstrip() for line in settings_text().splitlines()]
    return "\n".join(parts) + "\n"
