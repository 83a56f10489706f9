"""Kernels of several warpgroups, interpreted, in whatever order they take turns."""

import os
import subprocess
import sys
from pathlib import Path

LIMIT = 400
"""Seconds, so that what waits for ever fails."""


def test_where_there_are_threads() -> None:
    """In a process of its own: interpreted warpgroups wait for each other in XLA's threads, of
    which there are as many as processors unless NPROC says otherwise."""
    tests = sorted(map(str, Path(__file__).parent.glob("interpreted_*.py")))
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", *tests]
    environment = os.environ | {"NPROC": "16"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 0, run.stdout + run.stderr
