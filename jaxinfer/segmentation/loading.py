"""A model of any of the files that hold one."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints import progress_bar, resolve, sam
from jaxinfer.sam.config import Config, ConfigError, for_gpu
from jaxinfer.sam.params import Params
from jaxinfer.sam.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class SamModel:
    """A model in memory: its shape, its parameters and its tokeniser."""

    config: Config
    params: Params
    tokenizer: Tokenizer

    @classmethod
    def load(
        cls,
        path_or_name: str | Path,
        *,
        clicks: bool = False,
        dtype: Any = None,
        progress: bool = False,
    ) -> "SamModel":
        """From a directory, one of Meta's `.pt` files, or the name of a shipped checkpoint.

        The tokeniser is read from the directory, or from the one that the file is in. `dtype` is
        that of the arithmetic; None takes bfloat16 on a GPU and float32 elsewhere. `progress` shows
        a bar.

        Raises CheckpointError, ConfigError or FileNotFoundError for what cannot be loaded.
        """
        path = resolve(path_or_name, torch_files=True)
        on_gpu = jax.default_backend() == "gpu"
        if dtype is None:
            dtype = jnp.bfloat16 if on_gpu else jnp.float32
        # Before the weights, which take longer to find wanting.
        config = sam.read_config(path)
        directory = path if path.is_dir() else path.parent
        tokenizer = Tokenizer.read(directory, config.text.context)
        if tokenizer.vocab_size > config.text.vocab_size:
            raise ConfigError(
                f"the tokeniser in {directory} has {tokenizer.vocab_size} tokens, the model "
                f"{config.text.vocab_size}; put the model's own there"
            )
        with progress_bar(f"loading {path_or_name}") if progress else nullcontext() as advance:
            _, params = sam.load(path, clicks=clicks, dtype=dtype, cfg=config, progress=advance)
        config = for_gpu(config) if on_gpu and dtype == jnp.bfloat16 else config
        return cls(config, params, tokenizer)
