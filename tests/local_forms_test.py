"""Compressed messages and pipelines between real processes: the steps equal those of as many devices of one process.

Gossip and all-reduce are tested together: each run costs every process its compilation.
"""

import pytest

from tests import several_runs

pytestmark = pytest.mark.usefixtures("quick_compilation")
PIPELINES = "workers=2,stages=2,microbatches=2"
RUNS = [f"mixer=choco,codec=int8,tied,{PIPELINES}", f"method=allreduce,reducer=codec(codec=int8,form=shards),{PIPELINES}"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    # With two devices per process, the stages of a worker would share a process.
    return several_runs.rows(RUNS, tmp_path_factory.mktemp("runs"), num_processes=4)


@pytest.mark.parametrize("argument", RUNS)
def test_processes_and_devices_have_the_same_trajectory(rows, argument):
    """In every step, including bytes between workers and between stages."""
    several_runs.assert_same(*rows[argument])
