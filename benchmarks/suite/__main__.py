"""Every stage beside bare matrix products and plain code; the options are those of pytest-benchmark: `make bench`."""

import sys
from pathlib import Path

import pytest

sys.exit(pytest.main([str(Path(__file__).parent), *sys.argv[1:]]))
