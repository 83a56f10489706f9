"""`jaxinfer bench`: names, options and help of the benchmarks.

As in `jaxinfer.cli`, what brings in JAX is imported by the command that runs.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.commands.bench_segment import segment, segment_fp8

if TYPE_CHECKING:
    from jaxinfer.bench.decode import Point
    from jaxinfer.bench.peer import Rival, Shape

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="full, full-bf16, mid, mid-bf16 or toy, drawn at random; or a checkpoint.",
    ),
]
Out = Annotated[Path | None, typer.Option(help="A file to which JSON lines are appended.")]
Chart = Annotated[Path | None, typer.Option(help="A picture of what was measured (.png, .svg).")]
At = Annotated[
    list[str] | None, typer.Option(help="STREAMSxCONTEXT, for example 32x1024; may be repeated.")
]
Kernels = Annotated[
    str | None,
    typer.Option(
        help="Families of kernels, with commas; none: plain XLA.  [default: all there is]"
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Decode steps a call.")]
Calls = Annotated[int, typer.Option(min=4, help="Decode calls that are timed.")]
Peer = Annotated[
    str | None, typer.Option(help="transformers or vllm: run the same there, before ours.")
]
PeerPython = Annotated[
    Path | None, typer.Option(help="The Python of an environment that has it.  [default: this]")
]
PeerOptions = Annotated[
    str, typer.Option(help="JSON, or @FILE, for its driver: see docs/benchmarks.md.")
]


app.command()(segment)
app.command()(segment_fp8)


@app.callback()
def main() -> None:
    """Measure this engine on this device, and others beside it.

    Every figure is a JSON line with what is needed to make it again. `--model toy` tries a
    benchmark in seconds, on a CPU too.

    Example: `jaxinfer bench decode --model full --out lines.jsonl --chart decode.png`
    """


@app.command()
def decode(
    model: Model = "full",
    at: At = None,
    steps: Steps = 4,
    calls: Calls = 16,
    kernels: Kernels = None,
    command_buffers: Annotated[bool, typer.Option(help="Let XLA make CUDA graphs.")] = True,
    peer: Peer = None,
    peer_python: PeerPython = None,
    peer_options: PeerOptions = "{}",
    out: Out = None,
    chart: Chart = None,
) -> None:
    """Milliseconds a step and tokens a second in a steady state.

    Prompts are taken as read: contexts are set up without running them.

    Example: `jaxinfer bench decode --model full --at 1x128 --at 32x1024`
    """
    if not command_buffers:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()
    from jaxinfer.bench.decode import POINTS, measure_decode
    from jaxinfer.bench.peer import Shape, against

    families = _checked(kernels, chart)
    points = _points(at) or list(POINTS)
    shapes = [Shape(p.streams, p.context, steps * calls, p.streams) for p in points]
    theirs = _peer(peer, peer_python, peer_options, model, shapes)
    records = measure_decode(_subject(model), points, steps=steps, calls=calls, kernels=families)
    pairs = zip(shapes, records, strict=True)
    key = "steady_tokens_per_second"
    _tell(
        "decode",
        (against(ours, theirs.get(shape), "tokens_per_second", key) for shape, ours in pairs),
        out,
        chart,
    )


@app.command()
def verify(
    model: Model = "full",
    at: Annotated[str, typer.Option(help="STREAMSxCONTEXT.")] = "1x1024",
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of a step.  [default: 1 2 4 8]")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="ngram: what verifying costs; mtp: and drafting.  [default: ngram]"),
    ] = None,
    steps: Steps = 4,
    calls: Calls = 16,
    kernels: Kernels = None,
    acceptance: Annotated[
        Path | None, typer.Option(help="Lines of a trained checkpoint's acceptance.")
    ] = None,
    out: Out = None,
    chart: Chart = None,
) -> None:
    """What it costs to verify drafts: steps of several rows against one.

    Tokens a second are told for simulated acceptance, and for that of the trained tiny checkpoint.

    Example: `jaxinfer bench verify --model full --rows 1 --rows 4`
    """
    from jaxinfer.bench.verify import ACCEPTANCE, ROWS, measure_verify, read_acceptance

    families, point = _checked(kernels, chart), _points([at])[0]
    records = measure_verify(
        _subject(model),
        point,
        rows or ROWS,
        drafter or ["ngram"],
        steps=steps,
        calls=calls,
        kernels=families,
        measured=read_acceptance(acceptance or ACCEPTANCE),
    )
    _tell("verify", records, out, chart)


@app.command()
def prefill(
    model: Model = "full",
    prompt: Annotated[
        list[int] | None, typer.Option(help="Tokens.  [default: 128 1024 8192]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each size.")] = 5,
    kernels: Kernels = None,
    peer: Peer = None,
    peer_python: PeerPython = None,
    peer_options: PeerOptions = "{}",
    out: Out = None,
    chart: Chart = None,
) -> None:
    """Time to the first token of an idle engine.

    Example: `jaxinfer bench prefill --model full --prompt 1024`
    """
    from jaxinfer.bench.peer import Shape, against
    from jaxinfer.bench.prefill import SIZES, measure_prefill

    families, sizes = _checked(kernels, chart), prompt or list(SIZES)
    shapes = [Shape(1, size, 1, repeats) for size in sizes]
    theirs = _peer(peer, peer_python, peer_options, model, shapes)
    records = measure_prefill(_subject(model), sizes, repeats=repeats, kernels=families)
    pairs = zip(shapes, records, strict=True)
    key = "first_token_milliseconds"
    _tell(
        "prefill",
        (against(ours, theirs.get(shape), key, f"{key}.p50") for shape, ours in pairs),
        out,
        chart,
    )


@app.command()
def load(
    model: Model = "full",
    streams: Annotated[int, typer.Option(min=1, help="Users who each wait for an answer.")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    output: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 256,
    requests: Annotated[
        int | None, typer.Option(min=1, help="In all.  [default: three a user]")
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="Also an open loop of so many requests a second.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Decode steps a call.")] = None,
    kernels: Kernels = None,
    peer: Peer = None,
    peer_python: PeerPython = None,
    peer_options: PeerOptions = "{}",
    out: Out = None,
    chart: Chart = None,
) -> None:
    """Throughput and latencies with many users, or at a rate.

    Example: `jaxinfer bench load --model full --streams 32 --rate 4`
    """
    from jaxinfer.bench.load import Load, measure_load
    from jaxinfer.bench.peer import Shape, against

    families, count = _checked(kernels, chart), requests or 3 * streams
    loads = [Load(streams, prompt, output, count, pace) for pace in (None, *(rate or ()))]
    shape = Shape(streams, prompt, output, count)
    theirs = _peer(peer, peer_python, peer_options, model, [shape])
    records = measure_load(_subject(model), loads, steps=steps, kernels=families)
    key = "output_tokens_per_second"
    _tell(
        "load",
        (against(ours, None if ours["rate"] else theirs.get(shape), key, key) for ours in records),
        out,
        chart,
    )


@app.command("all")
def everything(
    model: Model = "full",
    only: Annotated[
        list[str] | None,
        typer.Option(help="decode, verify, prefill, load, kernels, one-answer.  [default: all]"),
    ] = None,
    kernels: Kernels = None,
    out: Out = None,
) -> None:
    """The benchmarks above with one set of weights, and whether answers stay the same.

    One that fails does not keep the others from being measured.

    Example: `jaxinfer bench all --model full --out lines.jsonl`
    """
    from jaxinfer.bench.everything import BENCHES, measure_everything

    families = _checked(kernels, None)
    if unknown := sorted(set(only or ()) - set(BENCHES)):
        raise ValueError(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHES)}")
    failures = []
    for name, records in measure_everything(_subject(model), only or list(BENCHES), families):
        try:
            _tell(name, records, out, None)
        except Exception as error:
            typer.echo(f"{name} failed: {error}", err=True)
            failures.append(name)
    if failures:
        raise typer.Exit(1)


@app.command()
def startup(
    files: Annotated[Path, typer.Argument(help="A checkpoint, best in the engine's own format.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="First draw this model and write it there.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="For compiled programs.  [default: beside the files]")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    context: Annotated[int, typer.Option(min=2, help="Tokens that a request may have.")] = 2048,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a start may take.")] = 600,
    out: Out = None,
    chart: Chart = None,
) -> None:
    """From a fresh process to the first token, with a cold and a warm compilation cache.

    Example: `jaxinfer bench startup /tmp/full --model full`
    """
    from jaxinfer.bench.startup import measure_startup, write

    _checked(None, chart)
    if model is not None:
        write(model, files)
    beside = files.with_name(f"{files.name}.cache")
    # All of it before this process takes the device to name it.
    records = list(
        measure_startup(files, cache or beside, prompt=prompt, context=context, timeout=timeout)
    )
    _tell("startup", records, out, chart)


@app.command()
def kernels(
    model: Model = "full",
    at: At = None,
    steps: Steps = 4,
    calls: Calls = 8,
    kernels: Kernels = None,
    drafts: Annotated[int, typer.Option(min=0, help="Verified in every step.")] = 0,
    drafter: Annotated[str, typer.Option(help="Where they come from: ngram or mtp.")] = "ngram",
    prefill: Annotated[
        list[int] | None, typer.Option(help="Instead, prompts of so many tokens.")
    ] = None,
    out: Out = None,
    chart: Chart = None,
) -> None:
    """A decode step, or a prompt, by kernel and family, from the profiler's trace.

    Example: `jaxinfer bench kernels --model full --at 1x128`
    """
    from jaxinfer.bench.kernels import measure_kernels, measure_prefill_kernels

    if at and prefill:
        raise ValueError("--at is about decode steps, --prefill about prompts: give one of them")
    families, points = _checked(kernels, chart), _points(at or ["1x128"])
    subject = _subject(model)
    if prefill:
        records = measure_prefill_kernels(subject, prefill, kernels=families)
    else:
        records = measure_kernels(
            subject,
            points,
            steps=steps,
            calls=calls,
            kernels=families,
            speculation=drafter if drafts else None,
            drafts=drafts,
        )
    _tell("kernels", records, out, chart)


@app.command()
def ablation(
    model: Model = "full",
    at: At = None,
    steps: Annotated[int, typer.Option(min=2, help="Decode steps a call, in the last.")] = 4,
    calls: Calls = 16,
    only: Annotated[
        list[int] | None, typer.Option(help="Numbers of variants, from 0.  [default: all]")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a variant may take.")] = 300,
    out: Out = None,
    chart: Chart = None,
) -> None:
    """What each choice is worth: plain XLA, each family of kernels, graphs, several steps a call.

    Each variant runs in a process of its own.

    Example: `jaxinfer bench ablation --model mid --at 1x128`
    """
    from jaxinfer.bench.ablation import measure_ablation, variants

    _checked(None, chart)
    made = variants(steps=steps)
    if bad := [number for number in only or () if not 0 <= number < len(made)]:
        raise ValueError(f"there is no variant {bad[0]}; they are 0 to {len(made) - 1}")
    chosen = [made[number] for number in only] if only else made
    records = measure_ablation(chosen, model, at or ["1x128"], calls=calls, timeout=timeout)
    _tell("ablation", records, out, chart, measured_elsewhere=True)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Files of JSON lines.")],
    to: Annotated[Path, typer.Option(help="A directory for the page and its charts.")],
    charts: Annotated[bool, typer.Option(help="Draw a chart of each benchmark.")] = True,
) -> None:
    """Make a page of tables and charts from what benchmarks wrote.

    Example: `jaxinfer bench report lines.jsonl --to docs/measurements/h200`
    """
    from jaxinfer.bench import report

    print(report.write(report.read(files), to, charts))


def _points(texts: list[str] | None) -> list["Point"]:
    from jaxinfer.bench.decode import Point

    try:
        pairs = [tuple(map(int, text.split("x"))) for text in texts or ()]
        points = [Point(streams, context) for streams, context in pairs]
    except ValueError:
        points = [Point(0, 0)]
    if any(point.streams < 1 or point.context < 1 for point in points):
        raise ValueError(f"--at takes STREAMSxCONTEXT, for example 32x1024, not {texts}")
    return points


def _checked(kernels: str | None, chart: Path | None) -> frozenset[str] | None:
    """Families of kernels by name; what is wrong is found before a model is drawn."""
    from jaxinfer.bench.charts import need_matplotlib
    from jaxinfer.bench.engines import known_families

    if chart is not None:
        need_matplotlib()
    return known_families(kernels)


def _subject(model: str) -> Any:
    from jaxinfer.bench.subjects import subject

    return subject(model)


def _peer(
    name: str | None, python: Path | None, options: str, model: str, shapes: list["Shape"]
) -> dict["Shape", dict[str, Any]]:
    """What a peer does with the same; nothing if there is none."""
    from jaxinfer.bench.peer import measure_peer, rival
    from jaxinfer.bench.subjects import configuration

    other: Rival | None = rival(name, python, options)
    if other is None:
        return {}
    raw = configuration(model)
    if raw is None:
        raise ValueError(f"peers run models drawn at random (--model full, mid, …), not {model}")
    return measure_peer(other, raw, shapes)


def _tell(
    bench: str,
    records: Iterable[dict[str, Any]],
    out: Path | None,
    chart: Path | None,
    measured_elsewhere: bool = False,
) -> None:
    """Print lines as they come, append them to a file, and draw them."""
    from jaxinfer.bench.charts import draw
    from jaxinfer.bench.record import append, command, write

    lines = []
    for record in records:
        line = {"bench": bench, **record}
        if measured_elsewhere:
            line["command"] = command()
            write(out, line)
        else:
            line = append(out, **line)
        lines.append(line)
    if chart is not None:
        draw(lines, chart)
