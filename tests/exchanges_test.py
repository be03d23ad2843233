"""Each kind of exchange between real processes: the steps equal those of as many devices of one process.

Local forms, in which devices of a process exchange among themselves first, are in local_forms_test.
"""

import pytest

from tests import several_runs

pytestmark = pytest.mark.usefixtures("quick_compilation")
DEVICES = "digits:simulate=false,workers=4"
KINDS = {
    "parameters with a neighbor": "topology=one_peer_exponential",
    "trackers, and rounds until replicas agree": "method=tracking,mixer=consensus_control,order=atc,topology=ring",
    "sums along a tree": "mixer=relay,topology=double_binary_tree",
    "weights, a step late": "mixer=overlap_push_sum,topology=directed_exponential",
    "parameters of earlier steps": "mixer=delayed,order=atc,topology=ring",
    "codes and what they lack": "mixer=choco,codec=int4,topology=ring",
    "the mean now and then": "method=slowmo_gossip,every=2,topology=ring",
    "a pair drawn by lot": "method=noloco,every=2",
    "the largest entries": "method=sparseloco,every=2",
    "a fragment at a time": "method=streaming_diloco(fragments=2,delay=1),every=4",
    "codes of a sum": "method=zero_one_adam(doubling=2,refresh=1),reducer=codec(codec=int8,start=2)",
    "factors": "method=allreduce,reducer=dion,rank=2",
    "units of a network": "method=ist,every=2",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return several_runs.rows(
        [f"{DEVICES},{argument}" for argument in KINDS.values()], tmp_path_factory.mktemp("runs"), num_processes=2
    )


@pytest.mark.parametrize("kind", KINDS)
def test_processes_and_devices_have_the_same_trajectory(rows, kind):
    # Processes add in another order than devices. Where a sum is rounded to codes, its last bit can change a code by a whole step,
    # which shows in the consensus distance and hardly in the loss.
    several_runs.assert_same(*rows[f"{DEVICES},{KINDS[kind]}"], distance_rtol=1e-3 if kind == "codes of a sum" else 1e-4)
