"""The garbage collector rests during imports, and only then."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from fcl_bench.garbage import resting_collector, set_imports_aside


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_in_the_block_and_as_before_behind_it(was_on):
    set_to = (gc.disable, gc.enable)
    set_to[was_on]()
    try:
        with resting_collector():
            assert not gc.isenabled()
        assert gc.isenabled() == was_on
        with pytest.raises(ImportError), resting_collector():
            raise ImportError
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_that_is_made_later_is_still_collected():
    set_imports_aside()
    cycle = Cycle()
    gone = weakref.ref(cycle)
    set_imports_aside()  # the second job of a sweep must not keep what the first one left
    del cycle
    gc.collect()
    assert gone() is None


def test_a_run_starts_without_looking_for_garbage_among_its_imports(feature_file, tmp_path):
    arguments = ["data=features", f"data.path={feature_file}", f"out={tmp_path}", "method=afl", "tasks=2"]
    program = (
        "import gc, sys\n"
        "from fcl_bench import app\n"
        "full = []\n"
        "gc.callbacks.append(lambda phase, info: full.append(0) if info['generation'] == 2 else 0)\n"
        "set_aside = app.set_imports_aside\n"
        "def at_start():\n"
        "    assert 'torch' in sys.modules\n"
        "    assert len(full) <= 6, len(full)  # two calls each\n"
        "    set_aside()\n"
        "    assert gc.get_freeze_count() > 100_000\n"
        "    print('set aside')\n"
        "app.set_imports_aside = at_start\n"
        f"sys.argv = ['fcl-bench', *{arguments!r}]\n"
        "sys.exit(app.main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "set aside" in done.stdout
