"""Configs that are refused while they are resolved, each in one line with its reason."""

import pytest

from configs import lm
from decjax import train
from tests.runs import spec_of


@pytest.mark.parametrize(
    "argument, name, value, constraint",
    [
        ("", "seed", -1, "at least 0"),
        ("", "seed", 2**32, "at most 4294967295"),
        ("", "optimizer.b1", 1.0, "less than 1"),
        ("", "optimizer.b2", float("nan"), "finite"),
        ("optimizer=sgdm", "optimizer.momentum", -0.1, "at least 0"),
        ("optimizer=muon", "optimizer.adam_b2", 1.0, "less than 1"),
        ("", "optimizer.weight_decay", -1.0, "at least 0"),
        ("", "schedule.final_fraction", 2.0, "at most 1"),
        ("", "method.strength", 1.5, "at most 1"),
        ("", "schedule.learning_rate", 0.0, "must be positive"),
        ("", "schedule.learning_rate", float("inf"), "finite"),
        ("", "optimizer.eps", float("inf"), "finite"),
        ("method=allreduce,reducer=powersgd", "reducer.gate", float("nan"), "finite"),
        ("", "pipeline.microbatches", 0, "at least 1"),
        ("", "batch_size", -8, "at least 0"),
        ("", "batch_size", 0, "use 8"),
        ("", "batch_size", 20, "use 16 or 24"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_range(argument, name, value, constraint):
    config = lm.get_config(f"smoke,workers=8,{argument}")
    config.update_from_flattened_dict({name: value})
    with pytest.raises(train.ConfigError, match=f"{name}={value}.*{constraint}"):
        spec_of(config)


@pytest.mark.parametrize(
    "mixer, complaint",
    [
        ("gossip", "mixer 'gossip' is unknown; use one of exact, "),
        ("choco(codec=None)", "codec"),
        ("exact(codec=zip)", "codec 'zip' is unknown"),
        ("exact(codec=int8(bits=4))", "no .*option.*bits"),
        ("exact(codec='int8(block=)')", "codec 'int8.block=.' must read like"),
        ("exact(gamma=0.5)", "mixer 'exact' has no option 'gamma'; use "),
        ("choco(codec=int8,gamma=2.0)", "gamma=2.0"),
        ("power_gossip(rank=0)", "rank=0"),
        ("power_gossip(codec=int8)", "mixer 'power_gossip' has no option 'codec'; use rank"),
        ("dcd(codec=int8,rounds=2)", "mixer 'dcd' has no option 'rounds'; use codec"),
        ("accelerated(codec=int8)", "mixer 'accelerated' has no option 'codec'; use rounds"),
    ],
)
def test_mixers_that_cannot_be_are_refused_with_the_reason(mixer, complaint):
    with pytest.raises((train.ConfigError, ValueError), match=complaint) as error:
        spec_of(lm.get_config(f"smoke,workers=8,topology=ring,mixer={mixer}"))
    assert "\n" not in str(error.value)


def test_a_mixer_with_a_weight_of_its_own_is_not_damped():
    config = lm.get_config("smoke,workers=8,mixer=push_sum,codec=int8")
    config.method.strength = 0.5
    with pytest.raises(train.ConfigError, match="mixer 'push_sum' with its own gamma"):
        spec_of(config)


@pytest.mark.parametrize(
    "argument, message",
    [
        (
            "method=allreduce,mixer=choco",
            "mixer=choco changes nothing with method=allreduce; leave it out, or use method=decentralized",
        ),
        (
            "mixer=beer,codec=int8,topology=one_peer_exponential",
            "needs a static symmetric graph, but topology 'one_peer_exponential' varies in time",
        ),
        ("mixer=choco,codec=int8,topology=random_digraph", "use mixer 'push_sum'"),
        ("stale", "stale=True changes nothing with method 'decentralized' and mixer 'exact'; leave it out"),
        ("method=allreduce,codec=int8", "codec=int8 changes nothing with method 'allreduce' and reducer 'mean'"),
        ("topology=complete,codec=int8", "topology 'complete' has no messages that a codec could encode"),
        (
            "method=tracking,topology=random_digraph",
            "use 'directed_exponential' or another graph .*, or mixer 'push_sum' with method 'decentralized'",
        ),
        ("method=slowmo(outer_momentum=nan)", "option outer_momentum=nan: must be finite; use a number such as 0.6"),
        ("order=atc,engine=split", "engine 'split' needs an exchange .* use engine 'fused'"),
    ],
)
def test_compositions_that_do_not_fit_are_refused(argument, message):
    with pytest.raises((train.ConfigError, ValueError), match=message) as error:
        spec_of(lm.get_config(f"smoke,workers=8,{argument}"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "argument, named",
    [
        ("method=slowmo_gossip(every=4),mixer=overlap_push_sum", "those of mixer 'overlap_push_sum' differ; use"),
        ("method=gossip_diloco(every=4),mixer=overlap_push_sum", "mixer 'overlap_push_sum' has to hear of every step; use"),
        ("method=tracking,mixer=delayed", "for which mixer 'delayed' is not made; use mixer 'exact' or 'beer'"),
        ("method=gt_nsgdm,mixer=overlap_push_sum", "for which mixer 'overlap_push_sum' is not made; use mixer 'exact' or 'choco'"),
        ("method=exact_diffusion,mixer=delayed", "that of mixer 'delayed' is not, .* method 'tracking' with mixer 'beer'$"),
        ("method=exact_diffusion,mixer=overlap_push_sum", "that of mixer 'overlap_push_sum' is not"),
        ("method=decentlam,mixer=push_sum", "which mixer 'push_sum' cannot follow; use mixer 'exact' or 'choco'$"),
        (
            "method=decentlam,mixer=overlap_push_sum",
            "method 'decentlam' mixes after its step, and mixer 'overlap_push_sum' is made to",
        ),
        ("mixer=overlap_push_sum,order=atc", "mixer 'overlap_push_sum' is made for order 'awc'; use that"),
        (
            "method=decentralized(strength=0.5),mixer=overlap_push_sum",
            "1 with mixer 'overlap_push_sum', whose .* use strength 1, or",
        ),
    ],
)
def test_a_mixer_that_a_method_cannot_take_is_named(argument, named):
    with pytest.raises(train.ConfigError, match=named) as error:
        spec_of(lm.get_config(f"smoke,workers=8,topology=ring,{argument}"))
    assert "\n" not in str(error.value)
