"""Write the environment of a Slurm task to a file in --workdir named after the task's number."""

import json
import os
import pathlib
import sys

if __name__ == "__main__":
    given = dict(argument.lstrip("-").partition("=")[::2] for argument in sys.argv[1:])
    pathlib.Path(given["workdir"], f"{os.environ['SLURM_PROCID']}.json").write_text(json.dumps(dict(os.environ)))
