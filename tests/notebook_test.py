"""docs/quickstart.ipynb: its cells run from top to bottom, and the displayed outputs were saved."""

import json
import os
import pathlib
import subprocess
import sys

DOCS = pathlib.Path(__file__).parents[1] / "docs"
CELLS = [
    cell for cell in json.loads((DOCS / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
]


def test_all_cells_run():
    code = "\n\n".join("".join(cell["source"]) for cell in CELLS)
    environment = os.environ | {"MPLBACKEND": "agg"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=DOCS, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "accuracy" in ran.stdout and "a step takes" in ran.stdout


def test_outputs_are_kept():
    """The page shows what cells print and draw; after a change, run the notebook again (see docs/requirements.txt)."""
    for cell in CELLS:
        source = "".join(cell["source"])
        shows = [line for line in source.splitlines() if line.startswith(("print(", "draw(", "    print("))]
        assert bool(cell["outputs"]) == bool(shows), source
        assert not [output for output in cell["outputs"] if output["output_type"] == "error"], source
        assert cell["execution_count"] is not None, source
