"""`jaxinfer bench segment` and `segment-fp8`: names, options and help."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from jaxinfer.bench.segment import Size


def segment(
    model: Annotated[
        str, typer.Option("--model", "-m", help="full or toy, drawn at random; or a checkpoint.")
    ] = "full",
    fp8: Annotated[bool, typer.Option("--fp8", help="The trunk's matrices in FP8.")] = False,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Pictures embedded together; may be repeated.  [default: 1 8 16]"),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="WIDTHxHEIGHT of the pictures; may be repeated.  [default: 1008x1008 1920x1080]"
        ),
    ] = None,
    pictures: Annotated[int, typer.Option(min=1, help="Of a timed stream, at most.")] = 256,
    objects: Annotated[int, typer.Option(min=1, help="Asked for in every picture.")] = 10,
    only: Annotated[
        list[str] | None,
        typer.Option(help="memory, throughput, latency, device, kernels.  [default: all]"),
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="transformers: run the same there, before ours.")
    ] = None,
    peer_python: Annotated[
        Path | None, typer.Option(help="The Python of an environment that has it.  [default: this]")
    ] = None,
    peer_options: Annotated[
        str, typer.Option(help="JSON, or @FILE, for its driver: see docs/benchmarks.md.")
    ] = "{}",
    out: Annotated[
        Path | None, typer.Option(help="A file to which JSON lines are appended.")
    ] = None,
) -> None:
    """Pictures a second from JPEG files to masks as run lengths, latency, memory, kernels.

    What fails is a line that says so, and does not keep the rest from being measured.

    Example: `jaxinfer bench segment --model full --out lines.jsonl`
    """
    from jaxinfer.bench.record import append, command, write
    from jaxinfer.bench.segment import PARTS, Plan, measure_segment
    from jaxinfer.bench.segment_peer import measure_segment_peers, segment_rivals

    if unknown := sorted(set(only or ()) - set(PARTS)):
        raise ValueError(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    given: dict[str, Any] = {"batches": tuple(batch or ()), "sizes": tuple(map(_size, size or ()))}
    plan = Plan(**{k: v for k, v in given.items() if v}, pictures=pictures, objects=objects)
    rivals = segment_rivals(peer, peer_python, peer_options)
    peers = []
    # Their lines name no device of JAX's: it would take the memory that they need.
    for line in measure_segment_peers(
        rivals, _configuration(model) if rivals else {}, plan.batches
    ):
        peers.append(line | {"command": command()})
        write(out, peers[-1])
    from jaxinfer.bench.sam_subjects import sam_subject

    subject = sam_subject(model, in_fp8=fp8)
    lines = [
        append(out, **line) for line in measure_segment(subject, plan, only or list(PARTS), peers)
    ]
    if any("failure" in line for line in (*peers, *lines)):
        raise typer.Exit(1)


def segment_fp8(
    model: Annotated[
        str, typer.Option("--model", "-m", help="full or toy, drawn at random; or a checkpoint.")
    ] = "full",
    word: Annotated[
        list[str] | None, typer.Option(help="What to look for; may be repeated.  [default: person]")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Where to look for it.  [default: a drawn picture]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A file to which JSON lines are appended.")
    ] = None,
) -> None:
    """What FP8 in the image encoder changes: features, scores and masks, against float32.

    Example: `jaxinfer bench segment-fp8 --model tiny_sam --picture scene.jpg --word "red ring"`
    """
    from jaxinfer.bench.record import append
    from jaxinfer.bench.sam_subjects import sam_subject
    from jaxinfer.bench.segment_fp8 import measure_fp8

    file = None if picture is None else picture.read_bytes()
    found = measure_fp8(sam_subject(model), word or ["person"], file)
    append(out, bench="segment-fp8", **found)


def _configuration(model: str) -> dict[str, Any]:
    """The `config.json` of a model that is drawn at random."""
    from checkpoints.sam.write import to_dict
    from jaxinfer.bench.sam_subjects import DRAWN

    if model not in DRAWN:
        raise ValueError(f"peers run models drawn at random (--model full or toy), not {model}")
    return to_dict(DRAWN[model])


def _size(text: str) -> "Size":
    from jaxinfer.bench.segment import Size

    try:
        size = Size(*map(int, text.split("x")))
    except (ValueError, TypeError):
        size = Size(0, 0)
    if min(size) < 1:
        raise ValueError(f"--size takes WIDTHxHEIGHT, for example 1920x1080, not {text}")
    return size
