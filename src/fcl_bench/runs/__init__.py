"""One run, from settings to a run folder."""

import sys

from fcl_bench import CalledPackage

sys.modules[__name__].__class__ = CalledPackage
