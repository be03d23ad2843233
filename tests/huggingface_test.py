"""Models of Hugging Face: logits of `transformers`, round trips, runs that start from them, exports, one-line errors.

tests/data/huggingface/make.py made the models and their logits.
"""

import json
import os
import pathlib
import shutil
import struct

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from configs import llama
from decjax import config, models
from decjax.models import huggingface
from tests import commands, runs

pytestmark = pytest.mark.usefixtures("quick_compilation")

FOLDER = pathlib.Path(__file__).parent / "data/huggingface"
FAMILIES = ("llama", "qwen2", "gpt2")
LAYER = "model.layers.1.self_attn.k_proj.weight"


def logits_of(folder):
    with np.load(FOLDER / folder / "logits.npz") as stored:
        return stored["tokens"], stored["logits"]


def copy(folder, to):
    return pathlib.Path(shutil.copytree(FOLDER / folder, to / folder))


def parameters(folder):
    return jax.tree.map(np.asarray, models.pretrained(str(folder)).init(jax.random.key(0)))


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    model, (tokens_BxT, expected) = models.pretrained(str(FOLDER / family)), logits_of(family)
    np.testing.assert_allclose(jax.jit(model.logits)(model.init(jax.random.key(0)), tokens_BxT), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_changes_no_bit(family, tmp_path):
    described, params = huggingface.options(FOLDER / family), parameters(FOLDER / family)
    huggingface.write(tmp_path / "again", params, *described)
    assert huggingface.options(tmp_path / "again") == described
    assert_equal(parameters(tmp_path / "again"), params)
    stored, again = (safetensors.load_file(folder / huggingface.WEIGHTS) for folder in (FOLDER / family, tmp_path / "again"))
    assert stored.keys() == again.keys()
    for name, x in stored.items():
        np.testing.assert_array_equal(np.float32(x), again[name], name)


def test_weights_in_several_files(tmp_path):
    folder = copy("llama", tmp_path)
    tensors = safetensors.load_file(folder / huggingface.WEIGHTS)
    (folder / huggingface.WEIGHTS).unlink()
    names = {name: f"model-{len(name) % 2}.safetensors" for name in tensors}
    for file in set(names.values()):
        safetensors.save_file({name: x for name, x in tensors.items() if names[name] == file}, folder / file)
    (folder / huggingface.INDEX).write_text(json.dumps({"weight_map": names}))
    assert_equal(parameters(folder), parameters(FOLDER / "llama"))
    (folder / "model-1.safetensors").unlink()
    assert "has no whole model-1.safetensors (No such file" in problem_of(folder)


def test_names_of_a_model_without_its_output_layer(tmp_path):
    folder = copy("gpt2", tmp_path)
    tensors = safetensors.load_file(folder / huggingface.WEIGHTS)
    masks = {"h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32)}  # as in the files of the original GPT-2
    safetensors.save_file(
        {name.removeprefix("transformer."): x for name, x in tensors.items()} | masks, folder / huggingface.WEIGHTS
    )
    assert_equal(parameters(folder), parameters(FOLDER / "gpt2"))


def test_a_shorter_context_reads_fewer_positions():
    tokens_BxT, expected = logits_of("gpt2")
    model = models.pretrained(str(FOLDER / "gpt2"), context=8)
    params = model.init(jax.random.key(0))
    assert params["positions"]["embedding"].shape == (8, 16)
    np.testing.assert_allclose(model.logits(params, tokens_BxT[:, :8]), expected[:, :8], rtol=1e-4, atol=1e-4)


def test_it_initializes_only_when_it_is_called(tmp_path):
    folder = copy("llama", tmp_path)
    model = models.pretrained(str(folder))
    (folder / huggingface.WEIGHTS).unlink()
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(np.shape, parameters(FOLDER / "llama"))


# -- Runs -------------------------------------------------------------------------------------------------------------


def config_of(shorthand="", family="qwen2"):
    return llama.get_config(f"smoke,steps=3,pretrained={FOLDER / family}{shorthand}")


def test_all_workers_start_with_the_stored_parameters():
    trainer = runs.trainer_of(config_of(",workers=2"))
    params = parameters(FOLDER / "qwen2")
    jax.tree.map(lambda x_N, x: np.testing.assert_array_equal(x_N, np.stack([x, x])), trainer.init().params, params)
    for layout in ("stages=2", "fsdp=2"):
        divided = runs.trainer_of(config_of(f",workers=2,{layout}"))
        assert_equal(divided.average(divided.init())[0], params)


def test_a_run_is_exported_as_its_average(tmp_path):
    run = runs.run_of(config_of(",workers=2,simulate", "gpt2"), tmp_path / "run")
    run.train()
    done = commands.run("launch.export", f"--run={tmp_path / 'run'}", f"--out={tmp_path / 'out'}")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    told = " ".join(done.stdout.split())
    assert "the averaged model of" in told and "after 3 steps" in told
    assert_equal(parameters(tmp_path / "out"), jax.tree.map(np.asarray, run.trainer.average(run.state)[0]))
    modes = [(tmp_path / "out" / name).stat().st_mode for name in (huggingface.CONFIG, huggingface.WEIGHTS)]
    assert modes[0] == modes[1]
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    again = commands.run("launch.export", f"--run={tmp_path / 'run'}", f"--out={tmp_path / 'out'}")
    assert again.returncode == 2 and "has a model.safetensors already; choose another --out" in again.stderr


@pytest.mark.parametrize(
    "content, problem",
    [
        (None, "holds no run: No such file or directory; give the --workdir of launch.train"),
        (
            '{"model": {"name": "decoder"}}',
            "trains model 'decoder', and only 'llama', 'gpt2' can be exported; use configs/llama.py",
        ),
        ('{"task": "quadratics"}', "trains model None"),
    ],
)
def test_what_cannot_be_exported_is_refused(tmp_path, content, problem):
    if content:
        (tmp_path / "config.json").write_text(content)
    done = commands.run("launch.export", f"--run={tmp_path}", f"--out={tmp_path / 'out'}")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and problem in line
    assert not (tmp_path / "out").exists()


# -- What is refused --------------------------------------------------------------------------------------------------


def problem_of(folder, **changes):
    with pytest.raises(ValueError) as error:
        models.pretrained(str(folder), **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


def rewrite(folder, **changes):
    """Change fields of config.json; None removes one."""
    path = folder / huggingface.CONFIG
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


@pytest.mark.parametrize(
    "fields, problem",
    [
        (dict(model_type="bloom"), "is of the architecture 'bloom'; use one of llama, qwen2, gpt2"),
        (dict(model_type=None), "is of the architecture None"),
        (dict(hidden_size=None), "lacks hidden_size in config.json; give the folder of a complete model"),
        (dict(hidden_act="gelu"), "has hidden_act='gelu' in config.json; use a model with hidden_act='silu'"),
        (dict(attention_bias=True), "has attention_bias=True"),
        (dict(rope_parameters={"rope_type": "llama3", "rope_theta": 5.0}), "has rope_type='llama3'"),
        (dict(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}), "has rope_type='linear'"),
        (dict(head_dim=8), "has head_dim=8 in config.json; use a model with head_dim=4"),
        (dict(vocab_size=300), r"has lm_head.weight of shape (256, 16), and config.json implies (300, 16)"),
        (dict(num_hidden_layers=3), "lacks the tensor model.layers.2."),
        (dict(num_hidden_layers="two"), "depth='two' must be a whole number"),
        (dict(num_attention_heads=3), "has head_dim=4 in config.json; use a model with head_dim=5"),
        (dict(vocab_size=10**12), "vocabulary=1000000000000 must be at most"),
    ],
)
def test_configs_that_do_not_fit_are_refused(tmp_path, fields, problem):
    folder = copy("llama", tmp_path)
    rewrite(folder, **fields)
    assert problem in problem_of(folder)


@pytest.mark.parametrize(
    "fields, problem",
    [
        (dict(n_embd=None), "lacks n_embd in config.json"),
        (
            dict(activation_function="relu"),
            "has activation_function='relu' in config.json; use a model with activation_function='gelu_new'",
        ),
        (dict(scale_attn_by_inverse_layer_idx=True), "has scale_attn_by_inverse_layer_idx=True"),
        (dict(tie_word_embeddings=False), "has tie_word_embeddings=False"),
        (dict(n_positions=65), "has transformer.wpe.weight of shape (64, 16), and config.json implies (65, 16)"),
        (dict(n_inner=None), "has transformer.h.0.mlp.c_fc.bias of shape (24,), and config.json implies (64,)"),
    ],
)
def test_configs_of_gpt2_that_do_not_fit_are_refused(tmp_path, fields, problem):
    folder = copy("gpt2", tmp_path)
    rewrite(folder, **fields)
    assert problem in problem_of(folder)


def header(fields, length=None, data=b""):
    text = json.dumps(fields).encode()
    return struct.pack("<Q", length or len(text)) + text + data


@pytest.mark.parametrize(
    "content, problem",
    [
        (lambda whole: whole[: len(whole) // 2], "has no whole model.safetensors (incomplete metadata"),
        (lambda whole: whole[:5], "has no whole model.safetensors (header too small)"),
        (lambda whole: b"", "has no whole model.safetensors (header too small)"),
        (lambda whole: header({}, 2**50), "has no whole model.safetensors (header too large)"),
        (lambda whole: header({}, 5000), "(invalid header length)"),
        (lambda whole: header({LAYER: {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}), "(incomplete metadata"),
        (lambda whole: b"<html>" * 100, "has no whole model.safetensors"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, problem):
    path = (folder := copy("llama", tmp_path)) / huggingface.WEIGHTS
    path.write_bytes(content(path.read_bytes()))
    assert problem in problem_of(folder)


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda x: None, f"lacks the tensor {LAYER}; give the folder of a complete model"),
        (lambda x: x[:-1], f"has {LAYER} of shape (7, 16), and config.json implies (8, 16); give the config.json of these weights"),
        (lambda x: x.astype(np.int8), f"has {LAYER} of type I8; give weights that are not quantized"),
    ],
)
def test_other_tensors_are_refused(tmp_path, change, problem):
    path = (folder := copy("llama", tmp_path)) / huggingface.WEIGHTS
    tensors = safetensors.load_file(path)
    changed = change(tensors.pop(LAYER))
    safetensors.save_file(tensors if changed is None else tensors | {LAYER: np.ascontiguousarray(changed)}, path)
    assert problem in problem_of(folder)


def test_other_refusals(tmp_path):
    assert "has no readable config.json (No such file or directory); give a folder" in problem_of(tmp_path)
    folder = copy("llama", tmp_path)
    (folder / huggingface.CONFIG).write_text("{")
    assert "has no readable config.json (Expecting property name" in problem_of(folder)
    problem = problem_of(FOLDER / "llama", vocabulary=512)
    assert "has vocabulary=256, and model.vocabulary=512; use model.vocabulary=256" in problem
    assert "has theta=500.0, and model.theta=10000.0" in problem_of(FOLDER / "llama", theta=10_000.0)
    assert "has 64 positions, and model.context=65; use a shorter context" in problem_of(FOLDER / "gpt2", context=65)
    with pytest.raises(ValueError, match="is a model 'llama', and model.name='gpt2'; use model.name='llama'"):
        models.gpt2(pretrained=str(FOLDER / "llama"))
    (folder / huggingface.WEIGHTS).unlink()
    shutil.copy(FOLDER / "llama" / huggingface.CONFIG, folder / huggingface.CONFIG)
    os.mkfifo(folder / huggingface.WEIGHTS)
    assert "has no whole model.safetensors (it is a pipe or a device" in problem_of(folder)


def test_configs_refuse_it_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="has no readable config.json") as error:
        llama.get_config(f"pretrained={tmp_path}")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"size=1B has no effect with pretrained={tmp_path}; leave one out"):
        llama.get_config(f"pretrained={tmp_path},size=1B")
    changed = config_of()
    changed.model.vocabulary = 300
    with pytest.raises(config.ConfigError, match="has vocabulary=256, and model.vocabulary=300") as error:
        config.resolve(changed, 2)
    assert "\n" not in str(error.value)
