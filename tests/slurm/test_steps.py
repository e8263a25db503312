"""`steps.sh` without a Slurm: its functions with stand-ins for Slurm's commands."""

import os
import subprocess
from pathlib import Path

from longtrain.assets import asset_dir


def test_the_first_of_very_many_nodes_is_found(tmp_path: Path) -> None:
    """More names than a pipe holds: a reader that leaves after the first would end the script."""
    stand_in = tmp_path / "scontrol"
    stand_in.write_text("#!/bin/bash\nprintf 'node%05d\\n' {1..10000}\n")
    stand_in.chmod(0o755)
    script = f"set -euo pipefail; source {asset_dir('recipes') / 'slurm' / 'steps.sh'}; echo $MASTER_ADDR"
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NAME": "longtrain-train",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[00001-10000]",
    }
    done = subprocess.run(["bash", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "node00001\n"), done.stderr
