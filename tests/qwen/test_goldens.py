"""The model against transformers, float32, on a tiny random checkpoint (see tests/goldens)."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints import load
from jaxinfer.qwen import model
from jaxinfer.qwen.cache import Place
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import PREFILL, decode_mode
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.positions import mrope_positions
from jaxinfer.qwen.state import own_pages
from jaxinfer.qwen.vision import encode
from tests.qwen.helpers import (
    GOLDENS,
    ROOM,
    jit_draft,
    kept,
    relative_error,
    run_prompt,
    scores,
    step,
)

pytestmark = pytest.mark.also_gpu
TOLERANCE = 1e-4
Cases = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def float32_products() -> Iterator[None]:
    """A GPU would multiply float32 in TF32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def checkpoint() -> tuple[Config, Params]:
    return load(GOLDENS)


@pytest.fixture(scope="module")
def cfg(checkpoint: tuple[Config, Params]) -> Config:
    return checkpoint[0]


@pytest.fixture(scope="module")
def params(checkpoint: tuple[Config, Params]) -> Params:
    return checkpoint[1]


@pytest.fixture(scope="module")
def cases() -> Cases:
    return load_file(GOLDENS / "cases.safetensors")


def prefilled(cfg: Config, params: Params, cases: Cases, name: str, **options):
    x = model.embed(params, cfg, cases[f"{name}.input_ids"])
    return run_prompt(params, cfg, x, **options)


def decoded(cfg: Config, params: Params, state, tokens: np.ndarray):
    """Hidden states `[1, T, D]` of tokens fed one at a time, and the state."""
    hidden = []
    for token in tokens:
        h, state = step(params, cfg, state, np.array([[token]]))
        hidden.append(h)
    return jnp.concatenate(hidden, axis=1), state


@pytest.mark.parametrize("length", [5, 64, 71, 130, 200])
def test_prefill(cfg: Config, params: Params, cases: Cases, length: int) -> None:
    hidden, _ = prefilled(cfg, params, cases, f"prefill_{length}")
    out = scores(params, hidden[None], PREFILL)[0]
    assert relative_error(out, cases[f"prefill_{length}.logits"]) < TOLERANCE


def test_prefill_chunked_as_transformers_chunks_it(
    cfg: Config, params: Params, cases: Cases
) -> None:
    hidden, _ = prefilled(cfg, params, cases, "prefill_130", sizes=(1, 2))
    out = scores(params, hidden[None], PREFILL)[0]
    assert relative_error(out, cases["chunked_130.logits"]) < TOLERANCE


def test_three_position_rows(cfg: Config, params: Params, cases: Cases) -> None:
    positions = jnp.asarray(cases["mrope_71.position_ids"].T)
    hidden, _ = prefilled(cfg, params, cases, "mrope_71", positions=positions)
    out = scores(params, hidden[None], PREFILL)[0]
    assert relative_error(out, cases["mrope_71.logits"]) < TOLERANCE


def test_state_after_prefill(cfg: Config, params: Params, cases: Cases) -> None:
    _, state = prefilled(cfg, params, cases, "prefill_71")
    taps = cfg.linear_conv_kernel_dim - 1
    for index, layer in enumerate(cfg.gdn_layers):
        golden = f"decode_71.state_before.{{}}.{layer}"
        assert relative_error(state.recurrent[index, 0], cases[golden.format("recurrent")]) < 1e-4
        window = cases[golden.format("conv")][:, -taps:].T
        assert relative_error(state.conv[index, 0], window) < TOLERANCE
    keys = cases["decode_71.state_before.key.3"].swapaxes(0, 1)
    assert relative_error(kept(state.k, 0, 71)[0], keys) < TOLERANCE
    values = cases["decode_71.state_before.value.3"].swapaxes(0, 1)
    assert relative_error(kept(state.v, 0, 71)[0], values) < TOLERANCE


def test_prefill_then_decode(cfg: Config, params: Params, cases: Cases) -> None:
    _, state = prefilled(cfg, params, cases, "prefill_71")
    hidden, _ = decoded(cfg, params, state, cases["decode_71.input_ids"])
    out = scores(params, hidden, decode_mode())[0]
    assert relative_error(out, cases["decode_71.logits"]) < TOLERANCE


def test_training_forward(cfg: Config, params: Params, cases: Cases) -> None:
    tokens = jnp.asarray(np.pad(cases["prefill_130.input_ids"], (0, 62)))[None]
    out, _ = jax.jit(model.train_forward, static_argnums=1)(params, cfg, tokens)
    assert relative_error(out[0, :130], cases["prefill_130.logits"]) < TOLERANCE


def test_mtp_head_over_a_prompt_and_one_draft_further(
    cfg: Config, params: Params, cases: Cases
) -> None:
    hidden = jnp.asarray(cases["mtp_70.input_hidden"])
    x = model.embed(params, cfg, cases["mtp_70.input_ids"])
    pad = ((0, 2 * CHUNK - 70), (0, 0))
    ahead, hidden = (jnp.pad(a, pad).reshape(2, CHUNK, -1) for a in (x, hidden))
    _, state = run_prompt(params, cfg, x[:1])
    start = jnp.array([0, CHUNK])
    table = jnp.repeat(own_pages(1, ROOM), 2, axis=0)
    place = Place(table, start, jnp.array([CHUNK, CHUNK]))
    places = model.text_positions(start, CHUNK)
    ahead, state = jit_draft(params, cfg, ahead, hidden, state, place, places, PREFILL)
    ahead = ahead.reshape(1, 2 * CHUNK, -1)
    assert relative_error(ahead[0, :70], cases["mtp_70.hidden"]) < TOLERANCE
    out = scores(params, ahead, PREFILL)[0, :70]
    assert relative_error(out, cases["mtp_70.logits"]) < TOLERANCE

    second = model.embed(params, cfg, cases["mtp_70.second.input_ids"])[None]
    at = jnp.array([70])
    place = Place(own_pages(1, ROOM), at, jnp.array([1]))
    places = model.text_positions(at, 1)
    h, _ = jit_draft(params, cfg, second, ahead[:, 69:70], state, place, places, decode_mode())
    assert relative_error(h[0], cases["mtp_70.second.hidden"]) < TOLERANCE


def test_images_in_a_prompt_then_decode(cfg: Config, params: Params, cases: Cases) -> None:
    assert cfg.vision is not None
    assert params.vision is not None
    tokens = cases["multimodal.input_ids"]
    grids = tuple(tuple(int(n) for n in grid) for grid in cases["multimodal.image_grid_thw"])
    features = encode(
        params.vision, cfg.vision, jnp.asarray(cases["multimodal.pixel_values"]), grids
    )
    positions, delta = mrope_positions(tokens.tolist(), cfg, grids)
    x = model.embed_with_features(params, cfg, jnp.asarray(tokens), features)
    hidden, state = run_prompt(params, cfg, x, positions=jnp.asarray(positions.T))
    out = scores(params, hidden[None], PREFILL)[0]
    assert relative_error(out, cases["multimodal.logits"]) < TOLERANCE

    state = replace(state, rope_delta=jnp.array([delta, 0]))
    hidden, _ = decoded(cfg, params, state, cases["multimodal.decode.input_ids"])
    out = scores(params, hidden, decode_mode())[0]
    assert relative_error(out, cases["multimodal.decode.logits"]) < TOLERANCE
