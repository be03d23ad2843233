"""What a TPU compiler makes of the training step: gossip messages are in flight while the gradient is computed.

Programs are compiled ahead of time, without a chip; `make test-all` installs the compiler.
"""

import importlib.util

import pytest

from decjax.train import engine
from experiments.bench import fsdp
from experiments.bench import overlap as bench

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed; make test-all brings it")

GOSSIP = "topology=one_peer_exponential"
MOST = 0.8  # backward pass; both passes
OWN_LIMIT = 5  # transfers that the compiler keeps in flight by default


def schedules(argument, topology=bench.TOPOLOGY, **mixing):
    """Compile each phase lazily, when it is requested."""
    return bench.schedules(argument, bench.described(topology), **mixing)


def check_overlap(schedule):
    assert len(schedule.in_flight) > OWN_LIMIT
    for transfer in schedule.in_flight:
        assert transfer.collective.kind == "collective-permute" and transfer.asynchronous and not transfer.inside
        assert transfer.started == 0 and transfer.finished >= MOST and transfer.hidden >= MOST


def test_gossip_starts_before_the_forward_pass_and_ends_after_the_backward_pass_in_every_phase():
    found = list(schedules(GOSSIP))
    assert len(found) == 3
    for schedule in found:
        check_overlap(schedule)


@pytest.mark.parametrize(
    "argument, topology",
    [(f"{GOSSIP},codec=bfloat16", "v5e:2x4"), (f"{GOSSIP},codec=int8", "v5e:2x4"), (GOSSIP, "v6e:2x4")],
    ids=["16 bits", "8 bits", "v6e"],
)
def test_so_do_narrow_messages_and_on_other_chips(argument, topology):
    check_overlap(next(schedules(argument, topology)))


def test_left_alone_the_compiler_lets_messages_wait_for_the_backward_pass(monkeypatch):
    """Otherwise `engine` adds compiler options that this test does not need."""
    monkeypatch.setattr(engine, "early_exchange", lambda platform, program: {})
    late = [transfer for transfer in next(schedules(GOSSIP)).in_flight if transfer.started == 1]
    assert late and all(transfer.hidden == 0 for transfer in late)


def test_adapt_then_communicate_starts_after_the_backward_pass():
    found = {transfer[-3:] for transfer in next(schedules(f"{GOSSIP},order=atc")).in_flight}
    assert found == {(1, 1, 0)}


def test_a_traced_phase_waits_in_a_conditional():
    transfers = next(schedules(GOSSIP, static_phase=False)).in_flight
    assert transfers and all(
        transfer.inside == "conditional" and not transfer.asynchronous and transfer.hidden == 0 for transfer in transfers
    )


@pytest.mark.parametrize("argument", ["method=allreduce", "method=allreduce,stale"])
def test_all_reduce_is_one_message_that_the_step_waits_for(argument):
    """The gradients of scanned layers all become available at the end, and this compiler overlaps nothing with a reduction."""
    (transfer,) = next(schedules(argument)).in_flight
    assert transfer.collective.kind == "all-reduce" and not transfer.asynchronous and transfer.hidden == 0
    assert (transfer.started, transfer.finished) == ((0, 0) if "stale" in argument else (1, 1))


def test_work_is_counted_in_full():
    """FLOPs of the model's matrix products: D (3 D + D + 2 F) weights per layer, attention over T × T, and the head."""
    L, D, F, T, V = (bench.MODEL[name] for name in ("depth", "width", "hidden", "context", "vocabulary"))
    B = 2
    weights, attention = L * D * (4 * D + 2 * F) + D * V, L * 2 * T * D
    schedule = next(schedules("method=local"))
    # The backward pass recomputes the attention products, and once more where the compiler finds that cheaper.
    least, most = 2 * B * T * (weights + attention), 2 * B * T * (weights + 2 * attention)
    assert least <= schedule.forward_flops <= most
    assert 2 * least <= schedule.backward_flops <= 2 * most
    assert schedule.in_flight == ()


def test_gossip_of_workers_of_several_chips_overlaps_too():
    row = fsdp.ROWS[0]
    transfers, gossip = fsdp.transfers(*fsdp.compiled(row), row)
    assert all(transfer.asynchronous and transfer.collective.kind == "collective-permute" for transfer in gossip)
    # A model this small has little work to hide a message; the bench reports that of 1B parameters.
    assert fsdp.meanwhile(gossip) >= 0.7 and len(transfers) > len(gossip)
