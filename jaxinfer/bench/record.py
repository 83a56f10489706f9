"""One JSON line a measurement, with all that is needed to make it again."""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax


def command() -> str:
    """What was called, without where its results go."""
    return " ".join(["python -m", _module(), *_arguments()])


def environment() -> dict[str, Any]:
    """Command, date, device and versions."""
    device = jax.devices()[0]
    return {
        "command": command(),
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "revision": _revision(),
    }


def append(path: Path | None, **measurement: Any) -> dict[str, Any]:
    """Print a measurement and its environment, and append both to a file if there is one."""
    line = {**measurement, **environment()}
    write(path, line)
    return line


def write(path: Path | None, measurement: Mapping[str, Any]) -> None:
    """The same for one that has its environment already."""
    line = json.dumps(measurement)
    print(line, flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(line + "\n")


def _arguments() -> list[str]:
    """The command's arguments without where its results go."""
    given = iter(sys.argv[1:])
    kept = []
    for argument in given:
        if argument in ("--out", "--chart"):
            next(given, None)
        elif not argument.startswith(("--out=", "--chart=")):
            kept.append(argument)
    return kept


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name


def _revision() -> str | None:
    """The commit that is checked out, marked if anything differs from it; None if there is none."""
    if named := os.environ.get("JAXINFER_REVISION"):
        return named
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
