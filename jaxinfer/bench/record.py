"""One JSON line a measurement, with all that is needed to make it again."""

import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import jax


def environment() -> dict[str, Any]:
    """Command, date, device and versions."""
    device = jax.devices()[0]
    return {
        "command": " ".join(["python -m", _module(), *_arguments()]),
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def append(path: Path | None, **measurement: Any) -> None:
    """Print a measurement, and append it to a file if there is one."""
    line = json.dumps({**measurement, **environment()})
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
        if argument == "--out":
            next(given, None)
        else:
            kept.append(argument)
    return kept


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else Path(sys.argv[0]).name
