"""Sweeps: jobs that report, workers that share the machine, and the parent that watches."""

import sys

from fcl_bench import CalledPackage

sys.modules[__name__].__class__ = CalledPackage
