"""Where checkpoints are: the ones that ship with the package, and the files beside the weights."""

from collections.abc import Mapping
from pathlib import Path

from checkpoints.files import CheckpointError

_HERE = Path(__file__).parent

SHIPPED: Mapping[str, Path] = {
    "tiny_qwen": _HERE / "tiny_qwen" / "bf16",
    "tiny_qwen-nvfp4": _HERE / "tiny_qwen" / "nvfp4",
    "tiny_sam": _HERE / "tiny_sam",
}
"""The little checkpoints, by the names that `resolve` takes."""

MANIFEST = "jaxinfer.json"
"""The file that marks a directory in the engine's own format."""

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files that a checkpoint needs beside weights and configuration."""


def resolve(path_or_name: str | Path, *, torch_files: bool = False) -> Path:
    """The directory of a checkpoint, from its path or the name of one that ships.

    Args:
        path_or_name: of the checkpoint.
        torch_files: accept a `.pt` file too, and a directory that has one in place of config.json.

    Raises CheckpointError listing the shipped names if there is no such directory.
    """
    shipped = SHIPPED.get(str(path_or_name))
    if shipped is not None:
        if not (shipped / "config.json").is_file():
            raise CheckpointError(f"{shipped} is absent: this installation lacks {path_or_name}")
        return shipped
    path = Path(path_or_name).expanduser()
    if (path / "config.json").is_file():
        return path
    if torch_files and (any(path.glob("*.pt")) or (path.suffix == ".pt" and path.is_file())):
        return path
    what = "has no config.json" if path.is_dir() else "is not a directory"
    raise CheckpointError(
        f"{path_or_name} {what}. Give the directory of a downloaded checkpoint (the one with "
        f"config.json), or the name of a shipped one: {', '.join(SHIPPED)}"
    )


def find(directory: str | Path, filename: str) -> Path | None:
    """A file that belongs to a checkpoint (tokeniser, chat template, generation defaults).

    Looks in the directory and, for the shipped checkpoints, which share such files, in its parent.
    Returns None if it is in neither.
    """
    directory = Path(directory)
    places = [directory]
    if directory.resolve() in {path.resolve() for path in SHIPPED.values()}:
        places.append(directory.resolve().parent)
    return next((path for place in places if (path := place / filename).is_file()), None)
