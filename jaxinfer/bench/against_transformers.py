"""A mid-size model with the same random weights in jaxinfer and in transformers, on one GPU.

    python -m jaxinfer.bench.against_transformers

needs PyTorch and transformers beside JAX; nothing else in the project does. Weights are written in
the published layout and read by both.

Two correct bfloat16 implementations differ by rounding, and much more wherever rounding turns a
router's choice of experts, which in a random model happens to most tokens. So there are two models:
one that routes, compared in float32 where no choice turns, and one in which every expert is chosen,
compared in bfloat16; there both are held against transformers in float32.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import load
from checkpoints.export import save_published
from jaxinfer.bench.record import append
from jaxinfer.qwen import model
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import PREFILL, decode_mode
from jaxinfer.qwen.params import Params, init
from jaxinfer.qwen.published import RAW
from jaxinfer.qwen.state import Pieces, Rows, init_state, own_pages

MID: dict[str, Any] = {
    **RAW,
    "text_config": {
        **RAW["text_config"],
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "layer_types": RAW["text_config"]["layer_types"][:8],
        "num_attention_heads": 8,
        "head_dim": 128,
        "rope_parameters": {
            **RAW["text_config"]["rope_parameters"],
            "mrope_section": [6, 5, 5],
        },
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 64,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
del MID["vision_config"]
DECODED = 8


def mid_size(experts_per_token: int) -> dict[str, Any]:
    """The configuration with so many of its 64 experts chosen."""
    return {**MID, "text_config": {**MID["text_config"], "num_experts_per_tok": experts_per_token}}


def random_weights(raw: dict[str, Any], seed: int) -> Params:
    """Random parameters in which no norm or bias is zero, so that nothing is hidden."""
    cfg = replace(Config.from_dict(raw), dtype="float32")
    params = init(cfg, jax.random.key(seed))
    keys = iter(jax.random.split(jax.random.key(seed + 1), 1000))

    def stir(a: jax.Array) -> jax.Array:
        scale = 0.02 if a.ndim >= 3 or a.shape[0] > 4096 else 0.1
        return a + scale * jax.random.normal(next(keys), a.shape)

    return jax.tree.map(stir, params)


def ours(directory: Path, tokens: np.ndarray, prompt: int, dtype: str) -> np.ndarray:
    """Logits `[T, V]` of a prompt prefilled by chunks, and the tokens after it decoded."""
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    raw["text_config"]["dtype"] = dtype
    file.write_text(json.dumps(raw))
    # Only float32 products are touched by it: the GPU would run them in TF32.
    with jax.default_matmul_precision("highest"):
        return _ours(directory, tokens, prompt)


def _ours(directory: Path, tokens: np.ndarray, prompt: int) -> np.ndarray:
    cfg, params = load(directory)
    rows = Rows(own_pages(1, len(tokens)), jnp.array([0]))
    state = init_state(cfg, 1, 1 + rows.table.size, 1)
    scratch, fresh = jnp.array([1]), jnp.array([True])
    prefill = jax.jit(model.prefill, static_argnums=1, donate_argnums=3)
    decode = jax.jit(model.decode, static_argnums=(1, 6), donate_argnums=3)
    scores = jax.jit(model.logits, static_argnums=2)
    out = []
    for begin in range(0, prompt, CHUNK):
        piece = tokens[begin : min(begin + CHUNK, prompt)]
        x = model.embed(params, cfg, jnp.asarray(np.pad(piece, (0, CHUNK - len(piece))))[None])
        start, valid = jnp.array([begin]), jnp.array([len(piece)])
        pieces = Pieces(rows.table, rows.slot, start, valid, rows.slot, scratch, fresh)
        places = model.text_positions(start, CHUNK)
        hidden, state = prefill(params, cfg, x, state, pieces, places)
        out.append(scores(params, hidden, PREFILL)[0, : len(piece)])
    mode, active = decode_mode(), jnp.array([True])
    for token in tokens[prompt:]:
        x = model.embed(params, cfg, jnp.array([[token]]))
        hidden, state = decode(params, cfg, x, state, rows, active, mode)
        state = model.accept(state, rows, jnp.array([1]))
        out.append(scores(params, hidden, mode)[0])
    return np.concatenate([np.asarray(a, np.float64) for a in out])


def theirs(directory: Path, tokens: np.ndarray, dtype: str) -> np.ndarray:
    """Logits `[T, V]` of transformers, eager, one forward pass."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import Qwen3_5MoeForCausalLM  # pyright: ignore[reportMissingImports]

    torch.backends.cuda.matmul.allow_tf32 = False
    loaded, info = Qwen3_5MoeForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    if info["missing_keys"]:
        raise SystemExit(f"transformers did not find {sorted(info['missing_keys'])[:5]}")
    net = loaded.to("cuda").eval()
    with torch.no_grad():
        scores = net(torch.tensor(tokens[None], device="cuda")).logits[0].double().cpu().numpy()
    del net
    torch.cuda.empty_cache()
    return scores


def compare(out: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Relative error over all logits, its median over tokens, and agreement on the likeliest."""
    a_token = np.linalg.norm(out - reference, axis=1) / np.linalg.norm(reference, axis=1)
    whole = np.linalg.norm(out - reference) / np.linalg.norm(reference)
    same = np.mean(out.argmax(1) == reference.argmax(1))
    return {
        "relative_error": float(whole),
        "median_token_error": float(np.median(a_token)),
        "same_top_token": float(same),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--out", type=Path, help="file to append to")
    a = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 32768, a.prompt + DECODED)
    for experts, dtype in ((8, "float32"), (64, "bfloat16")):
        raw = mid_size(experts)
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            params = random_weights(raw, 0)
            size = sum(leaf.size for leaf in jax.tree.leaves(params))
            save_published(directory, raw, params)
            del params
            exact = theirs(directory, tokens, "float32")
            peer = exact if dtype == "float32" else theirs(directory, tokens, dtype)
            found = ours(directory, tokens, a.prompt, dtype)
        against = {"jaxinfer_against_float32": compare(found, exact)}
        against["jaxinfer_decoded_against_float32"] = compare(found[a.prompt :], exact[a.prompt :])
        if dtype != "float32":
            against["transformers_against_float32"] = compare(peer, exact)
            against["jaxinfer_against_transformers"] = compare(found, peer)
        append(
            a.out,
            what=f"mid-size model against transformers, {dtype}",
            parameters=size,
            experts_per_token=experts,
            prompt=a.prompt,
            decoded=DECODED,
            **against,
        )


if __name__ == "__main__":
    main()
