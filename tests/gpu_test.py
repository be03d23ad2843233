"""experiments/gpu: a run of tiny models on CPU, refusals, and the page with and without results."""

import json
import re

import pytest

from experiments import gpu, script
from tests import commands


def test_all_parts_with_tiny_models_and_finished_rows_once(tmp_path):
    line, log = ("experiments.gpu", "--smoke", f"--out={tmp_path}"), tmp_path / "smoke" / "results.jsonl"
    done = commands.run(*line)
    assert done.returncode == 0, done.stderr
    rows = {row["fields"]["row"]: row["numbers"] for row in map(json.loads, log.read_text().splitlines())}
    assert {*rows} == {"card", *gpu.SMOKE_ROWS}
    assert [name for name, numbers in rows.items() if "failed" in numbers] == []
    assert {gpu.ROWS[name].part for name in gpu.SMOKE_ROWS} == {*gpu.COLUMNS}
    losses = [rows[name]["losses"] for name in gpu.SMOKE_ROWS if "losses" in rows[name]]
    assert len(losses) == 2 and all(last < first for (_, first), *_, (_, last) in losses)
    again = commands.run(*line, "--row=int8", "--row=float16")
    assert again.returncode == 0, again.stderr
    lines = log.read_text().splitlines()
    assert len(lines) == len(rows) + 1 and '"float16"' in lines[-1]
    other = json.dumps({"config": "experiments.gpu", "fields": {"row": "card"}, "numbers": {"device": "NVIDIA H200"}})
    log.write_text(other + "\n")
    refused = commands.run(*line)
    assert refused.returncode == 2 and refused.stderr.startswith("error: the results log has rows of NVIDIA H200, and this machine")


@pytest.mark.parametrize(
    "argument, refusal",
    [
        ("--minutes=1", "error: no GPU: JAX finds cpu only; .*--smoke"),
        ("--part=speed", "error: --part=speed is unknown; use some of mfu, loss"),
        ("--row=124M", "error: --row=124M is unknown; use some of "),
    ],
)
def test_mistakes_are_refused_on_one_line(argument, refusal, tmp_path):
    done = commands.run("experiments.gpu", f"--out={tmp_path}", argument)
    assert done.returncode == 2 and re.fullmatch(f"{refusal}.*\n", done.stderr), done.stderr


TEXT = {"tokens": 90_000_000}
RESULTS = {
    "card": {"device": "NVIDIA H200", "jax": "0.10.2", "day": "2026-12-01", "copy_GBps": 4000.0},
    "124M, 8 workers": {"step_s": 0.2, "tokens": 65536, "mfu": 0.283, "gib": 61.0},
    "1B, 8 workers": {"failed": "out of memory"},
    "all-reduce fp32": {"losses": [[0, 10.8], [1e7, 4.0], [2e7, 3.0]], "sent_bytes": 8.6e8, "text": TEXT},
    "gossip int8": {"losses": [[0, 10.8], [1e7, 4.2], [2e7, 3.3]], "sent_bytes": 1.2e8, "text": TEXT},
    "int8": {"encode": 0.9, "decode": 1.1, "both": 0.5, "smaller": 3.94, "error": 5e-5},
    "codec int8": {"update_s": 0.03, "more_s": 0.008, "to_gossip": 1.36, "to_all_reduce": 1.5},
}


def test_the_page_has_what_is_measured(tmp_path):
    shown = gpu.blocks(RESULTS)
    assert {name for name, block in shown.items() if block == gpu.NOT_MEASURED} == {"gpu_options", "gpu_schedules"}
    assert "MFU of a step is 28.3 % (124M, 8 workers)." in shown["gpu_answer"] and "by 4.0 %" in shown["gpu_answer"]

    def read(name, row):
        lines = [[cell.strip() for cell in line.split("|")] for line in shown[name].splitlines()]
        return next(line[2:-1] for line in lines if line[1:2] == [row])

    assert read("gpu_mfu", "124M, 8 workers") == ["200", "327,680", "28.3 %", "61.0"]
    assert read("gpu_mfu", "1B, 8 workers") == ["out of memory", "–", "–", "–"]
    assert read("gpu_loss", "gossip int8") == ["20.0", "3.300", "+10.0 %", "120.0", "90"]
    assert read("gpu_codecs", "int8") == ["3.94", "1,800", "2,200", "0.90", "1.10", "0.50"]
    assert read("gpu_overhead", "codec int8") == ["30.0", "1.36", "1.50", "4.0 %"]
    assert "../images/gpu.png" in shown["gpu_loss"]
    gpu.draw(str(tmp_path / "gpu.png"), RESULTS)
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


def test_without_results_the_page_says_so():
    page = (commands.ROOT / "docs/results/gpu.md").read_text()
    shown = gpu.blocks({})
    assert all(gpu.NOT_MEASURED in block for block in shown.values())
    assert all(script._place(name).search(page) for name in shown)
    assert not gpu.read(commands.ROOT / "experiments/results/gpu.jsonl") or gpu.NOT_MEASURED not in page
