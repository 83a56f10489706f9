"""`jaxinfer inspect`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoints import account, engine_format, resolve, sam
from checkpoints.files import TensorFiles
from checkpoints.inventory import Row
from checkpoints.load import quantization
from checkpoints.locate import MANIFEST
from checkpoints.plan import make_plan
from jaxinfer.commands.sizes import in_bytes, in_numbers
from jaxinfer.qwen.config import Config
from jaxinfer.sam.config import Config as SamConfig

WIDE = 100
"""Columns that the table has at least: piped, a terminal's width is unknown and 80 too few."""


def run(model: str) -> None:
    """Print what the headers say."""
    path = resolve(model, torch_files=True)
    console = Console(highlight=False)
    console.width = max(console.width, WIDE)
    if sam.is_sam(path):
        cfg, groups = sam.account(path)
        console.print(f"{model}: {describe_sam(cfg)}", markup=False, soft_wrap=True)
        console.print(sam_table(groups))
        return
    cfg, arrays, warnings = headers(path)
    console.print(f"{model}: {describe(cfg)}", markup=False, soft_wrap=True)
    console.print(table(account(cfg, arrays)))
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def headers(directory: Path) -> tuple[Config, Any, tuple[str, ...]]:
    """Configuration, shapes of the parameters, and warnings. Raises CheckpointError."""
    if (directory / MANIFEST).is_file():
        return *engine_format.shapes(directory), ()
    files = TensorFiles(directory)
    plan = make_plan(Config.read(directory), files.entries, quantization(directory))
    return plan.config, plan.arrays, plan.warnings


def describe(cfg: Config) -> str:
    """The architecture in a line."""
    full = sum(kind == "full_attention" for kind in cfg.layer_types)
    parts = [
        f"{cfg.num_layers} layers ({cfg.num_layers - full} Gated DeltaNet, {full} attention)",
        f"width {cfg.hidden_size}",
        f"{cfg.num_experts_per_tok} of {cfg.num_experts} experts a token",
        f"vocabulary {cfg.vocab_size:,}",
        f"context {cfg.max_position_embeddings:,}",
    ]
    parts += ["MTP head"] if cfg.mtp_layers else []
    parts += ["vision tower"] if cfg.vision else []
    return ", ".join(parts)


def table(rows: Sequence[Row]) -> Table:
    """A line a module, with sums."""
    shown = Table(show_footer=True, header_style="bold", footer_style="bold")
    shown.add_column("module", "all")
    shown.add_column("format")
    numbers = {
        "parameters": in_numbers(sum(row.parameters for row in rows)),
        "size": in_bytes(sum(row.nbytes for row in rows)),
        "read a token": in_bytes(sum(row.per_token for row in rows)),
    }
    for name, total in numbers.items():
        shown.add_column(name, total, justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        shown.add_row(
            row.module,
            row.format,
            in_numbers(row.parameters),
            in_bytes(row.nbytes),
            in_bytes(row.per_token) if row.per_token else "-",
            end_section=following is not None and _part(following) != _part(row),
        )
    return shown


def describe_sam(cfg: SamConfig) -> str:
    """The architecture in a line."""
    trunk, text = cfg.trunk, cfg.text
    parts = [
        f"pictures of {trunk.image_size} x {trunk.image_size} in {trunk.grid} x {trunk.grid} "
        "patches",
        f"trunk of {trunk.num_layers} layers, width {trunk.hidden_size}",
        f"text encoder of {text.num_layers} layers, {text.context} tokens a prompt",
        f"{cfg.num_queries} candidates",
    ]
    return ", ".join(parts)


def sam_table(groups: Sequence[sam.Group]) -> Table:
    """A line for each part of the model with sums, then one for each reason not to read tensors."""
    read = [group for group in groups if group.read]
    shown = Table(header_style="bold")
    shown.add_column("part")
    shown.add_column("format")
    for name in ("tensors", "parameters", "size"):
        shown.add_column(name, justify="right", no_wrap=True)
    for group in read:
        shown.add_row(group.name, *_sizes([group]), end_section=group is read[-1])
    shown.add_row("all that is read", *_sizes(read), style="bold", end_section=True)
    for group in groups:
        if not group.read:
            shown.add_row(f"not read: {group.name}", *_sizes([group]), style="dim")
    return shown


def _sizes(groups: Sequence[sam.Group]) -> tuple[str, ...]:
    return (
        ", ".join(dict.fromkeys(dtype for group in groups for dtype in group.dtypes)),
        f"{sum(group.tensors for group in groups):,}",
        in_numbers(sum(group.parameters for group in groups)),
        in_bytes(sum(group.nbytes for group in groups)),
    )


def _part(row: Row) -> str:
    return row.module.split(".")[0]
