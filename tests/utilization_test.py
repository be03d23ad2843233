"""FLOPs of models, peaks of devices, the metrics `mfu` and `goodput` of a run, and traces of its steps."""

import time
import types

import jax
import jax.numpy as jnp
import pytest

from configs import lm
from decjax import config, train
from decjax.program import jaxpr
from decjax.train import metrics, utilization
from launch import command, train_flags
from launch import train as launch_train
from tests import runs

pytestmark = pytest.mark.usefixtures("quick_compilation")


def setup_of(argument, **fields):
    made = lm.get_config(f"smoke,workers=4,{argument}")
    made.update_from_flattened_dict(fields)
    return config.resolve(made, 8).setup


@pytest.mark.parametrize("argument, devices", [("", 4), ("simulate", 1), ("fsdp=2", 8), ("stages=2", 8)])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_flops_of_a_decoder_are_those_of_its_weights_and_of_attention(argument, devices, remat):
    setup = setup_of(argument, **{"model.remat": remat})
    size, tokens = setup.spec.model.options, setup.spec.batch_size * setup.spec.model.options["context"]
    D, F, L, T, V = (size[name] for name in ("width", "hidden", "depth", "context", "vocabulary"))
    weights = L * (4 * D * D + 2 * D * F) + D * V
    assert utilization.model_flops(setup) == (6 * weights + 12 * L * T * D) * tokens / devices


def test_flops_of_convolutions_loops_and_branches():
    def fn(x_BxHxWxC, kernel_KxKxCxF, y_PxP):
        convolved = jax.lax.conv_general_dilated(
            x_BxHxWxC, kernel_KxKxCxF, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        branch = jax.lax.cond(y_PxP[0, 0] > 0, lambda y: y @ y, lambda y: y, y_PxP)
        return convolved, jax.lax.scan(lambda y, _: (y @ y_PxP, None), branch, length=5)

    traced = jaxpr.trace(fn, jnp.zeros((2, 4, 4, 3)), jnp.zeros((3, 3, 3, 7)), jnp.zeros((6, 6)))
    assert jaxpr.flops(traced.program) == 2 * (2 * 4 * 4 * 7) * (3 * 3 * 3) + (1 + 5) * 2 * 6**3


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ],
)
def test_peaks_of_devices(kind, peak):
    assert utilization.peak_flops(types.SimpleNamespace(device_kind=kind)) == peak


def test_a_continued_run_reports_mfu_and_goodput_and_writes_a_trace(tmp_path, monkeypatch):
    made, now_s = lm.get_config("smoke,workers=2,simulate,steps=4"), time.time
    made.update_from_flattened_dict({"log_every": 1, "checkpoint.every": 2, "eval.every": 2, "model.depth": 1})
    trainer, profile = runs.trainer_of(made), tmp_path / "profile"
    run = train.Run(trainer, tmp_path, peak_flops=1e12)
    monkeypatch.setattr(run, "_stop_requested", lambda caught: run.done == 2)
    run.train()
    monkeypatch.setattr(time, "time", lambda: now_s() + 1000)
    trace = lambda run: metrics.Profile(profile, range(3, 4), run.start, lambda: jax.block_until_ready(run.state))
    summary = train.Run(trainer, tmp_path, peak_flops=1e12).train([trace]).summary
    assert list(profile.glob("**/*.xplane.pb"))
    rows = metrics.read(tmp_path)
    per_token = trainer.model_flops / (trainer.spec.batch_size * trainer.setup.task.items) / 1e12
    assert rows and all(row["mfu"] == pytest.approx(row["tokens_per_s"] * per_token) for row in rows)
    taken_s = sum(trainer.model_flops / (1e12 * row["mfu"]) for row in rows if row["kind"] == "train")
    assert summary["mfu"] == pytest.approx(4 * trainer.model_flops / (1e12 * taken_s))
    assert 0 < summary["goodput"] <= taken_s / 1000


def test_a_run_that_continues_after_the_steps_to_trace_says_so(tmp_path, capsys):
    run = types.SimpleNamespace(first=True, start=4, workdir=tmp_path)
    launch_train.profile(range(4), run).close()
    assert capsys.readouterr().out == "--profile=0:4: nothing is traced, since the run continues from step 4\n"
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("text", ["5", "5:3", "2:2", "-1:3", "a:b", "1:2:3", ""])
def test_bad_ranges_of_steps_are_refused_in_one_line(text):
    with pytest.raises(command.UserError) as error:
        train_flags.read(["--config=configs/lm.py", "--workdir=runs/lm", f"--profile={text}"])
    assert "it must be START:STOP, two whole numbers, the first one less" in str(error.value) and "\n" not in str(error.value)
