"""`python -m fcl_bench` is the `fcl-bench` command."""

import sys

from fcl_bench.cli.app import main

sys.exit(main())
