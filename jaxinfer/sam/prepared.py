"""Parameters as the detector's program reads them: cut and converted once, not at every call.

A call for one picture is hundreds of small kernels, and takes as long as there are many of them.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.sam.layers import part
from jaxinfer.sam.params import Attention, DecoderLayer, Params


def prepared(params: Params) -> Params:
    """The same with matrices of the detector's attention apart that multiply different tokens, and
    in float32 what multiplies float32: the decoder's state, and what is made of it."""
    decoder, masks = params.decoder, params.masks
    return replace(
        params,
        geometry=_apart(params.geometry),
        encoder=_apart(params.encoder),
        decoder=replace(
            decoder,
            layers=tuple(_apart(_layer(layer)) for layer in decoder.layers),
            box_head=_wide(decoder.box_head),
            presence_head=_wide(decoder.presence_head),
        ),
        masks=replace(_apart(masks), instance=_wide(masks.instance), embed=_wide(masks.embed)),
        scoring=_wide(params.scoring),
    )


def _layer(p: DecoderLayer) -> DecoderLayer:
    return replace(p, linear1=_wide(p.linear1), linear2=_wide(p.linear2))


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda a: a.astype(jnp.float32), tree)


def _apart(tree: Any) -> Any:
    def cut(path: Any, node: Any) -> Any:
        if not isinstance(node, Attention):
            return node
        # What attends to itself has queries and keys of the same tokens.
        itself = path[-1].name == "self_attention"
        parts = ((0, 2), (2, 1)) if itself else ((0, 1), (1, 1), (2, 1))
        return replace(node, in_proj=tuple(part(node, *each) for each in parts))

    return jax.tree.map_with_path(cut, tree, is_leaf=lambda node: isinstance(node, Attention))
