import pathlib
def ed(f,*prs):
    p=pathlib.Path(f); s=p.read_text()
    for a,b in prs:
        assert s.count(a)==1,(f,a,s.count(a)); s=s.replace(a,b)
    p.write_text(s)
ed("docs/guides/runs.md",
("| with `--profile=START:STOP`: trace of these steps, for TensorBoard, XProf or Perfetto |","| with `--profile=START:STOP`: trace of these steps (JAX's profiler) |"),
('''| `mfu` | model FLOPs utilization: 3 × FLOPs of the forward pass's matrix products ÷ (time × devices × peak FLOP/s); recomputation does not count |
''','''| `mfu` | model FLOPs utilization: 3 × FLOPs of the forward pass's matrix products ÷ (time × devices × peak FLOP/s) |
'''),
('''The peak is that of known GPUs and TPUs in bf16, or `--peak_flops`; without one, `mfu` is absent.

''','''`mfu` needs a known GPU or TPU (bf16 peak), or `--peak_flops`.
'''),
('''| `goodput` | seconds in steps ÷ seconds since the run began; the rest is compilation, evaluations, checkpoints and interruptions |
| `mfu` | as above, of all steps |
''','''| `goodput` | seconds in steps ÷ seconds since the run began, with compilation, evaluations, checkpoints and interruptions |
| `mfu` | of all steps |
'''),
("| `eval_loss_coded` | pipelines with compressed activations: loss with the compression |","| `eval_loss_coded` | as `loss_coded` |"),
('''Training continues while a checkpoint is written, after the state is copied and the previous checkpoint is complete. On CPU, memory must hold a second
copy of the state meanwhile. If a run is killed while it saves, the next start removes the incomplete checkpoint (`STEP.orbax-checkpoint-tmp`) and
continues from the previous one.
''','''Training continues while a checkpoint is written, once the state is copied and the previous checkpoint complete. On CPU, memory must hold a second
copy meanwhile. If a run is killed while it saves, the next start removes the incomplete checkpoint (`STEP.orbax-checkpoint-tmp`).
'''),
('''`train` rows are written every `log_every` steps, `eval` rows every `eval.every` steps and at the end.
''','''`train` rows appear every `log_every` steps, `eval` rows every `eval.every` and at the end.
'''),
('''This starts from the newest undamaged checkpoint of another run, with any number of workers.

''','''This starts from the newest undamaged checkpoint, with any number of workers.

'''),
("so replicas that differ at the start stay different.","so different replicas stay different."),
('''| checkpoints missing, but metrics or a summary exist | refused, so that the run does not start again |
| `config.json` missing or unreadable, or directory in use | refused |
''','''| checkpoints missing, but metrics or a summary exist | refused |
| `config.json` missing or unreadable, or directory in use | refused |
'''),
("| state in a checkpoint not finite | refused; the error names the older step from which the run continues if you move this one away |","| state in a checkpoint not finite | refused; the error names the older step to continue from if you move this one away |"),
("| disk full, read-only or missing | ends with exit code 2; once the disk is writable, continues from the last complete checkpoint |","| disk full, read-only or missing | ends with exit code 2; once writable, continues from the last complete checkpoint |"),
("| `tensorboard/` | the numbers of `metrics.jsonl` as TensorBoard events: `train/loss`, `eval/loss`, … |","| `tensorboard/` | `metrics.jsonl` as TensorBoard events: `train/loss`, `eval/loss`, … |"),
("| `wandb/`, `wandb_id` | with `--tracker=wandb`: files of Weights & Biases, and the id for continuing there |","| `wandb/`, `wandb_id` | with `--tracker=wandb`: files and id of Weights & Biases |"),
("| `eval_accuracy`, `local_eval_accuracy_mean`, … | the same for further metrics of the [task](data.md), such as `eval_bleu`, `eval_excess` and `kept_edges` |","| `eval_accuracy`, `local_eval_accuracy_mean`, … | further metrics of the [task](data.md), such as `eval_bleu`, `eval_excess` and `kept_edges` |"),
("| `bytes_per_step_per_worker` | sent to other workers, mean over workers and steps |","| `bytes_per_step_per_worker` | sent to other workers (mean) |"),
("| `summary.json` | results of a finished run |","| `summary.json` | results at the end |"),
("| `consensus_distance` | Ξ = √(1/N Σ‖x_i − x̄‖²), the distance of the replicas from their average |","| `consensus_distance` | Ξ = √(1/N Σ‖x_i − x̄‖²), distance of the replicas from their average |"),
)
ed("docs/changelog.md",('''- Metrics have the utilization of devices (`mfu`), summaries the `goodput`; `--profile` traces steps.
''','''- Metrics `mfu` and `goodput`; `--profile` traces steps.
'''))
