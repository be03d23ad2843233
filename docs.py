import pathlib
def ed(f,*prs):
    p=pathlib.Path(f); s=p.read_text()
    for a,b in prs:
        assert s.count(a)==1,(f,a,s.count(a)); s=s.replace(a,b)
    p.write_text(s)
ed("docs/guides/data.md",
("Start from a Llama or Qwen2 model, with text in its tokens:","Start from a Llama, Qwen2 or GPT-2 model, with text in its tokens:"),
('''parameters, in fp32. The context is at most 1,024 tokens unless you set `--config.model.context`. `launch.export` writes the averaged model of the
newest checkpoint, which `transformers.AutoModelForCausalLM.from_pretrained("exported")` loads. Scaled rotary frequencies, sliding windows, biases
other than Qwen2's and quantized weights are refused. Import and export need `pip install safetensors`.
''','''parameters, in fp32. The context is at most 1,024 tokens unless you set `--config.model.context`. `launch.export` writes the averaged model of the
newest checkpoint, which `transformers.AutoModelForCausalLM.from_pretrained("exported")` loads. Scaled rotary frequencies, sliding windows, further
biases and quantized weights are refused. Import and export need `pip install safetensors`.
'''),
)
ed("docs/guides/runs.md",
('''| `train.log` | in sweeps''','''| `profile/` | with `--profile=START:STOP`: trace of these steps, for TensorBoard, XProf or Perfetto |
| `train.log` | in sweeps'''),
('''| `learning_rate` | in `train` rows''','''| `mfu` | model FLOPs utilization: 3 × FLOPs of the forward pass's matrix products ÷ (time × devices × peak FLOP/s); recomputation does not count |
| `learning_rate` | in `train` rows'''),
('''Bytes are read from''','''The peak is that of known GPUs and TPUs in bf16, or `--peak_flops`; without one, `mfu` is absent.

Bytes are read from'''),
('''| `bytes_per_step_per_worker` | sent''','''| `goodput` | seconds in steps ÷ seconds since the run began; the rest is compilation, evaluations, checkpoints and interruptions |
| `mfu` | as above, of all steps |
| `bytes_per_step_per_worker` | sent'''),
)
ed("docs/changelog.md",
('''- Models start from Hugging Face files of Llama or Qwen2; `launch.export` writes such files.
''','''- Models start from Hugging Face files of Llama, Qwen2 or GPT-2; `launch.export` writes such files.
'''),
('''## Runs

''','''## Runs

- Metrics have the utilization of devices (`mfu`), summaries the `goodput`; `--profile` traces steps.
'''))
ed("docs/reference/models.md",
("`decoder_lm`, `llama` and `lstm`","`decoder_lm`, `llama`, `gpt2` and `lstm`"),
('''members: [llama, pretrained, LlamaBlock]}
''','''members: [llama, LlamaBlock]}

::: decjax.models.gpt2
    options: {heading_level: 2, show_root_full_path: true, members: [gpt2, GPT2]}
'''),
("members: [options, config, read, write, check]","members: [pretrained, options, config, read, write, check]"),
)
ed("docs/reference/train.md",('''::: decjax.train.checkpoint''','''::: decjax.train.utilization
    options: {heading_level: 2, show_root_full_path: true, members: [peak_flops, model_flops]}

::: decjax.train.checkpoint'''))
ed("docs/reference/commands.md",('''| files in the work directory, continuing, `--resume_from` | [Run directories](../guides/runs.md) |
''','''| files in the work directory, continuing, `--resume_from`, `--profile`, `--peak_flops` | [Run directories](../guides/runs.md) |
'''))
ed("configs/llama.py",('''start from a Llama or Qwen2 in the files of Hugging Face: config.json and model.safetensors''','''start from a Llama, Qwen2 or GPT-2 in the files of Hugging Face: config.json and model.safetensors'''))
