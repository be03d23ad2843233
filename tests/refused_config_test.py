"""Configs that are refused while they are resolved, each on one line with its reason."""

import pytest

from configs import lm, quadratics
from decjax import config as parts
from decjax import train
from decjax.tasks import sources
from launch import config_file
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
        ("", "method.strength", 1.5, "at most 1|0, 1"),
        ("", "schedule.learning_rate", 0.0, "must be more than 0"),
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
    with pytest.raises(train.ConfigError, match=f"{name.rpartition('.')[2]}={value}.*{constraint}"):
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
            "mixer=choco has no effect with method=allreduce; leave it out, or use method=decentralized",
        ),
        (
            "mixer=beer,codec=int8,topology=one_peer_exponential",
            "mixer 'beer' needs a static graph, got topology 'one_peer_exponential'",
        ),
        ("mixer=choco,codec=int8,topology=random_digraph", "or mixer 'push_sum'"),
        ("stale", "stale=True has no effect with method 'decentralized'; leave it out"),
        ("method=allreduce,codec=int8", "codec=int8 has no effect with method 'allreduce' and reducer 'mean'"),
        ("topology=complete,codec=int8", "needs messages between nodes for its codec, .* got topology 'complete'"),
        (
            "method=tracking,topology=random_digraph",
            "use 'directed_exponential' or another one .*, or mixer 'push_sum' with method 'decentralized'",
        ),
        ("method=slowmo(outer_momentum=nan)", "outer_momentum=nan must be finite; the default is 0.6"),
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
        (
            "method=slowmo_gossip(every=4),mixer=overlap_push_sum",
            "needs a mixer with equal weights, got mixer 'overlap_push_sum'; use",
        ),
        ("method=gossip_diloco(every=4),mixer=overlap_push_sum", "need not see every step, got mixer 'overlap_push_sum'; use"),
        ("method=tracking,mixer=delayed", "also mixes trackers, got mixer 'delayed'; use mixer 'exact' or 'beer'"),
        ("method=gt_nsgdm,mixer=overlap_push_sum", "got mixer 'overlap_push_sum'; use mixer 'exact' or 'choco'"),
        (
            "method=exact_diffusion,mixer=delayed",
            "mixing that is linear, .* got mixer 'delayed'; .* method 'tracking' with mixer 'beer'$",
        ),
        ("method=exact_diffusion,mixer=overlap_push_sum", "mixing that is linear, .* got mixer 'overlap_push_sum'"),
        ("method=decentlam,mixer=push_sum", "got mixer 'push_sum'; use mixer 'exact' or 'choco'$"),
        (
            "method=decentlam,mixer=overlap_push_sum",
            "method 'decentlam' needs a mixer that can mix after the step, got mixer 'overlap_push_sum'",
        ),
        ("mixer=overlap_push_sum,order=atc", "mixer 'overlap_push_sum' is made for order 'awc'; use that"),
        (
            "method=decentralized(strength=0.5),mixer=overlap_push_sum",
            "the weights of mixer 'overlap_push_sum'; use strength 1, or",
        ),
    ],
)
def test_a_mixer_that_a_method_cannot_take_is_named(argument, named):
    with pytest.raises(train.ConfigError, match=named) as error:
        spec_of(lm.get_config(f"smoke,workers=8,topology=ring,{argument}"))
    assert "\n" not in str(error.value)


# -- Options that would change nothing --------------------------------------------------------------------------------

TEXTS = ["text"]


@pytest.mark.parametrize(
    "file, argument, fields, problem",
    [
        (
            lm,
            "method=allreduce",
            dict(consensus_every=5),
            "consensus_every=5 has no effect with method 'allreduce', whose replicas",
        ),
        (lm, "method=allreduce", dict(consensus_last=1), "consensus_last=1 has no effect with method 'allreduce', whose replicas"),
        (
            lm,
            "method=local",
            dict(bucket_bytes=64),
            "bucket_bytes=64 has no effect with method 'local', which sends nothing; leave",
        ),
        (lm, "method=local,local_size=2", {}, "local_size=2 has no effect with method 'local', which sends nothing; leave it out"),
        (lm, "method=decentralized(strength=0.0)", {}, "method.strength=0.0, so nothing would be mixed; use more .* 'local'"),
        (lm, "method=tracking(strength=0.0),topology=ring", {}, "method.strength=0.0, so nothing would be mixed"),
        (quadratics, "", {"eval.num_windows": 4}, "eval.num_windows=4 has no effect with task 'quadratics', which has one example"),
        (quadratics, "", {"eval.batch_size": 2}, "eval.batch_size=2 has no effect with task 'quadratics', which has one example"),
    ],
)
def test_an_option_that_changes_nothing_is_refused(file, argument, fields, problem):
    config = file.get_config(f"smoke,workers=8,{argument}")
    config.update_from_flattened_dict(fields)
    with pytest.raises(train.ConfigError, match=problem) as error:
        parts.resolve(config)
    assert "\n" not in str(error.value)


def test_local_training_with_averages_has_messages():
    config = lm.get_config("smoke,workers=8,method=local,local_size=2")
    config.update(consensus_every=5, bucket_bytes=64)
    assert parts.resolve(config).local_size == 2


@pytest.mark.parametrize(
    "name, is_refused", [("text.txt", True), ("folder", True), ("rows.jsonl", False), ("tests.refused_config_test:TEXTS", True)]
)
def test_a_field_is_for_rows(tmp_path, name, is_refused):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("text")
    (tmp_path / "rows.jsonl").write_text('{"body": "text"}\n')
    path = name if ":" in name else str(tmp_path / name)
    if is_refused:
        with pytest.raises(
            ValueError, match="data.field='body' has no effect: .* has neither JSON lines nor Parquet; leave it out"
        ):
            sources.read(path, "body")
    else:
        assert list(sources.read(path, "body")[1].values()) == [b"text"]


def test_a_scale_is_refused_beside_the_rate_that_it_would_scale():
    text = "configs/lm.py:workers=8,scale=linear"
    assert config_file.complaint(["train", f"--config={text}"]) == ""
    problem = "scale=linear has no effect with --config.schedule.learning_rate; leave one of them out"
    assert config_file.complaint(["train", f"--config={text}", "--config.schedule.learning_rate=0.1"]) == problem
    other = "configs/lm.py:workers=8,topology=ring"
    assert config_file.complaint(["train", f"--config={other}", "--config.schedule.learning_rate=0.1"]) == ""


def test_a_trainer_names_a_spec_that_is_none():
    with pytest.raises(
        ValueError, match="^Trainer: spec, a dict, must be a RunSpec .such as decjax.config.resolve.config.. or a Setup$"
    ):
        train.Trainer({"workers": 2})


def test_a_config_without_a_method_is_refused():
    with pytest.raises(parts.ConfigError, match="^config lacks method.name; add it, as configs/lm.py does$"):
        parts.resolve({"steps": 3})
