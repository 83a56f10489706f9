"""The `jaxinfer` command: names, options and help of its subcommands."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from jaxinfer.commands import bench

# The modules under `jaxinfer.commands` are imported by the command that runs: they bring in JAX,
# which takes seconds, and `jaxinfer --help` should not.


class _Commands(TyperGroup):
    """Tells the user of an error in one line, since its message names the remedy."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            if ctx.params["traceback"]:
                raise
            console = Console(stderr=True)
            console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench.app, name="bench")


@app.callback()
def main(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where in the code an error came from.")
    ] = False,
) -> None:
    """Run Qwen3.6-35B-A3B, compiled for one GPU; or its little sibling, on any computer.

    Start with `jaxinfer demo`: it needs no GPU and no download.
    """


class Speculation(StrEnum):
    """How tokens are drafted."""

    AUTO = "auto"
    MTP = "mtp"
    NGRAM = "ngram"
    NONE = "none"


class KvDtype(StrEnum):
    """How keys and values are stored."""

    BF16 = "bf16"
    FP8 = "fp8"


class Recipe(StrEnum):
    """What is quantised how; the names of `checkpoints.RECIPES`."""

    NVIDIA_MIX = "nvidia-mix"
    EXPERTS_ONLY = "experts-only"
    ALL = "all"


Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Directory of a checkpoint, or the name of a shipped one."),
]
Context = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens that prompt and answer may have together.  "
        "[default: 8192, or what the model was made for]",
    ),
]
Drafts = Annotated[
    Speculation,
    typer.Option(help="How tokens are drafted. It changes the speed, never the text."),
]
_OWN = "  [default: the checkpoint's own]"
Temperature = Annotated[
    float | None, typer.Option(min=0, help=f"0 always takes the likeliest token.{_OWN}")
]
TopK = Annotated[
    int | None, typer.Option(min=0, help=f"Choose among the K likeliest tokens; 0: all.{_OWN}")
]
TopP = Annotated[
    float | None,
    typer.Option(min=0, max=1, help=f"Choose among tokens that have this much together.{_OWN}"),
]
MinP = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help=f"Drop what is less likely than this part of the likeliest.{_OWN}"
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, max=2**32 - 1, help="Makes the same text again.  [default: another each time]"
    ),
]


def _given(**fields: Any) -> dict[str, Any]:
    """The options that the user has set."""
    return {name: value for name, value in fields.items() if value is not None}


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Where to write the picture with what was found in it.")
    ] = Path("jaxinfer-demo.png"),
) -> None:
    """Show what it does, in about a minute, on the CPU.

    A very small model with Qwen3.6's architecture, which ships with the package, continues some
    Python, thinks about a question and calls a tool. It knows an invented town, not the world.
    Another one, with SAM 3.1's, finds shapes in a drawn scene by their names.

    Example: `jaxinfer demo`
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxinfer.commands import demo

    demo.run(out)


@app.command()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue; @FILE reads a file; none reads standard input."),
    ] = None,
    model: Model = "tiny_qwen",
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")
    ] = None,
    context: Context = None,
    speculation: Drafts = Speculation.AUTO,
) -> None:
    """Continue a text and stream the result to standard output.

    The text goes to the model as it is; for conversations see `jaxinfer chat`. Figures
    go to standard error.

    Example: `jaxinfer generate "def read_lines(path):" --temperature 0 --max-tokens 60`
    """
    from jaxinfer.commands import generate

    sampling = _given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop) if stop else None,
    )
    generate.run(prompt, model, context, speculation, sampling)


@app.command()
def chat(
    model: Model = "tiny_qwen",
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    no_think: Annotated[bool, typer.Option("--no-think", help="Answer without thinking.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The most tokens of an answer.  [default: all that fit]"),
    ] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    context: Context = None,
    speculation: Drafts = Speculation.AUTO,
) -> None:
    """Talk with a model in the terminal.

    Thoughts are dim. `/reset` forgets the conversation, `/exit` or Ctrl-D
    ends it, Ctrl-C cuts an answer short.

    Example: `jaxinfer chat --system "Answer briefly." --temperature 0`
    """
    from jaxinfer.commands import chat

    sampling = _given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    chat.run(model, context, speculation, sampling, system=system, thinking=not no_think)


@app.command()
def segment(
    picture: Annotated[Path, typer.Argument(help="A picture, or a folder of them.")],
    words: Annotated[
        list[str] | None, typer.Argument(help='What to look for, such as "red circle".')
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="For a picture, the file for an overlay, or for COCO's JSON if it ends so; for a "
            "folder, a directory for both.  [default: segmented.png, segmented]"
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="Directory or .pt file of a checkpoint, or a shipped one's name."
        ),
    ] = "tiny_sam",
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="The score that an object must exceed.")
    ] = 0.5,
    max_objects: Annotated[
        int | None, typer.Option(min=1, help="The most objects for a phrase.  [default: all]")
    ] = None,
    nms_iou: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Drop what overlaps a better object by more than this.  [default: keep all]",
        ),
    ] = None,
    box: Annotated[
        list[str] | None,
        typer.Option(
            help="An example of what to look for: left,top,right,bottom in pixels; may be repeated."
        ),
    ] = None,
    point: Annotated[
        list[str] | None,
        typer.Option(
            help="A point on one object: x,y in pixels; may be repeated. For checkpoints with a "
            "click head."
        ),
    ] = None,
) -> None:
    """Find things in a picture by words, and draw them onto it.

    Example: `jaxinfer segment scene.png "red circle" "stars" --out overlay.png`
    """
    from jaxinfer.commands import segment

    segment.run(
        picture,
        words or [],
        box or [],
        point or [],
        out,
        model,
        threshold=threshold,
        max_objects=max_objects,
        nms_iou=nms_iou,
    )


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Directory of a language model's checkpoint, or the name of a shipped one.  "
            "[default: tiny_qwen, or none with --segmenter]",
        ),
    ] = None,
    segmenter: Annotated[
        str | None,
        typer.Option(
            help="A checkpoint of SAM to serve too, or alone if there is no --model; tiny_sam is a "
            "shipped one."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the language model.  [default: as given to --model]"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    max_batch: Annotated[
        int, typer.Option(min=1, max=64, help="Requests answered together; more wait.")
    ] = 8,
    context: Context = None,
    speculation: Drafts = Speculation.AUTO,
    draft_length: Annotated[
        int, typer.Option(min=1, max=16, help="The most tokens drafted in a step.")
    ] = 3,
    kv_dtype: Annotated[
        KvDtype | None,
        typer.Option(help="How keys and values are stored.  [default: as the model computes]"),
    ] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Keep what prompts have in common.")] = True,
    prefill_budget: Annotated[
        int | None,
        typer.Option(
            min=64,
            help="Tokens of prompts that are worked off between two decode calls, a multiple of "
            "64: more brings first tokens sooner, fewer keeps streams smooth.  "
            "[default: 512 on a GPU, 128 on a CPU]",
        ),
    ] = None,
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="The part of the device's memory to use.  "
            "[default: 0.95 of a GPU's, half of the host's]",
        ),
    ] = None,
) -> None:
    """Serve a model to OpenAI's clients: /v1/chat/completions, /v1/models, /health.

    With --segmenter also, or only, masks: /v1/segment.

    There is no authentication: keep it on this machine, or behind a proxy that has some.

    Example: `jaxinfer serve --model /models/Qwen3.6-35B-A3B-NVFP4 --name qwen`
    """
    from jaxinfer.commands import serve

    serve.run(
        model if model or segmenter else "tiny_qwen",
        segmenter,
        name,
        host,
        port,
        max_batch=max_batch,
        context=context,
        speculation=speculation,
        draft_length=draft_length,
        kv_dtype=kv_dtype,
        prefix_cache=prefix_cache,
        prefill_budget=prefill_budget,
        memory_fraction=memory_fraction,
    )


@app.command()
def inspect(
    model: Annotated[
        str,
        typer.Argument(help="Directory of a checkpoint, a .pt file, or the name of a shipped one."),
    ],
) -> None:
    """Show formats and sizes of a checkpoint's modules, without loading it.

    The last column of a language model is what decoding one token alone reads of each module:
    memory bandwidth divided by its sum bounds the tokens a second. Of SAM it is also told which
    tensors are not read, and why.

    Example: `jaxinfer inspect tiny_qwen`
    """
    from jaxinfer.commands import inspect

    inspect.run(model)


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(help="A bf16 checkpoint: a directory or shipped name.")],
    destination: Annotated[Path, typer.Argument(help="A directory that is new or empty.")],
    recipe: Annotated[
        Recipe,
        typer.Option(
            help="nvidia-mix: experts and head in NVFP4, attention in FP8; experts-only: routed "
            "experts in NVFP4; all: what nvidia-mix quantises, all in NVFP4."
        ),
    ] = Recipe.NVIDIA_MIX,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="A text file to run the model over, so that FP8 modules get static input scales; "
            "without it their inputs stay as they are."
        ),
    ] = None,
) -> None:
    """Write a quantised copy of a checkpoint, in the layout of NVIDIA's ModelOpt.

    Example: `jaxinfer quantize /models/Qwen3.6-35B-A3B /models/qwen-nvfp4 --calibrate some.txt`
    """
    from jaxinfer.commands import quantize

    quantize.run(source, destination, recipe, calibrate)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint: a directory or shipped name.")],
    destination: Annotated[Path, typer.Argument(help="A directory that is new or empty.")],
) -> None:
    """Write a checkpoint as it lies in memory, so that it loads as fast as the disk reads.

    Works for every format that can be loaded. The result is for this version of the engine.

    Example: `jaxinfer convert /models/qwen-nvfp4 /models/qwen-fast`
    """
    from jaxinfer.commands import convert

    convert.run(source, destination)


Contracts = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME]...", help="Operations, or how their names begin; none: all."),
]


@app.command()
def verify(
    names: Contracts = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the random inputs.  [default: another each time]")
    ] = None,
) -> None:
    """Hold every operation to its contract, in all ways that this machine can.

    On a CPU kernels are interpreted on small shapes and, with JAX's CUDA plugin installed, compiled
    for an H200; on a GPU they run on real shapes and are timed. The name `decode_step` compiles
    the whole step at full size.

    Example: `jaxinfer verify linear`
    """
    from jaxinfer.commands import verify

    verify.run(tuple(names or ()), seed)


@app.command()
def tune(
    names: Contracts = None,
    tuned: Annotated[
        Path | None,
        typer.Option(help="The table for the winners.  [default: the package's own]"),
    ] = None,
    knowledge: Annotated[Path, typer.Option(help="The directory for what is learnt.")] = Path(
        "docs/knowledge"
    ),
) -> None:
    """Find the fastest candidates and block sizes of operations on the GPU at hand.

    Example: `jaxinfer tune linear_fp8`
    """
    from jaxinfer.commands import tune

    tune.run(tuple(names or ()), tuned, knowledge)
