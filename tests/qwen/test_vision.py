"""The vision tower against transformers, and its promise that frames do not touch each other."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints.load import load
from jaxinfer.qwen.config import VisionConfig
from jaxinfer.qwen.params import Vision
from jaxinfer.qwen.positions import VisionInputError
from jaxinfer.qwen.vision import QUERY_BLOCK, encode, encode_frame, hidden, layout, pad
from pallas_kernels import Dense, PerLayer

GOLDENS = Path(__file__).parents[1] / "goldens" / "qwen"
jitted = jax.jit(encode, static_argnames=("cfg", "grids"))


@pytest.fixture(scope="module")
def checkpoint() -> tuple[VisionConfig, Vision]:
    cfg, params = load(GOLDENS)
    assert cfg.vision is not None
    assert params.vision is not None
    return cfg.vision, params.vision


@pytest.fixture(scope="module")
def cfg(checkpoint: tuple[VisionConfig, Vision]) -> VisionConfig:
    return checkpoint[0]


@pytest.fixture(scope="module")
def params(checkpoint: tuple[VisionConfig, Vision]) -> Vision:
    return checkpoint[1]


@pytest.fixture(scope="module")
def cases() -> dict[str, np.ndarray]:
    return load_file(GOLDENS / "cases.safetensors")


def grids_of(cases: dict[str, np.ndarray], name: str) -> tuple[tuple[int, int, int], ...]:
    return tuple((int(t), int(h), int(w)) for t, h, w in cases[name + ".grid_thw"])


def error(out: jax.Array, reference: np.ndarray) -> float:
    difference = np.asarray(out, np.float64) - reference
    return float(np.linalg.norm(difference) / np.linalg.norm(reference))


def random_patches(cfg: VisionConfig, count: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count, cfg.patch_dim))


@pytest.mark.parametrize("name", ["vision_images", "vision_video"])
@pytest.mark.parametrize("run", [encode, jitted], ids=["eager", "jit"])
def test_features_match_transformers(
    name: str, run, params: Vision, cfg: VisionConfig, cases: dict[str, np.ndarray]
) -> None:
    out = run(params, cfg, jnp.asarray(cases[name + ".pixel_values"]), grids_of(cases, name))
    assert out.dtype == jnp.float32
    assert error(out, cases[name + ".features"]) < 2e-6


@pytest.mark.parametrize("name", ["vision_images", "vision_video"])
def test_residual_stream_matches_transformers(
    name: str, params: Vision, cfg: VisionConfig, cases: dict[str, np.ndarray]
) -> None:
    rest = jnp.asarray(cases[name + ".pixel_values"])
    frames = [(h, w) for t, h, w in grids_of(cases, name) for _ in range(t)]
    streams = []
    for h, w in frames:
        streams.append(hidden(params, cfg, rest[: h * w], layout(cfg, h, w)))
        rest = rest[h * w :]
    assert error(jnp.concatenate(streams), cases[name + ".hidden"]) < 2e-6


def test_neighbours_do_not_change_a_bit(params: Vision, cfg: VisionConfig) -> None:
    grids = ((1, 4, 6), (2, 4, 4), (1, 4, 6), (1, 18, 16))
    counts = [t * h * w for t, h, w in grids]
    parts = jnp.split(random_patches(cfg, sum(counts)), np.cumsum(counts)[:-1].tolist())
    alone = [jitted(params, cfg, part, (grid,)) for part, grid in zip(parts, grids, strict=True)]
    together = jitted(params, cfg, jnp.concatenate(parts), grids)
    np.testing.assert_array_equal(together, jnp.concatenate(alone))


def test_frames_of_a_video_are_pictures(params: Vision, cfg: VisionConfig) -> None:
    patches = random_patches(cfg, 2 * 4 * 6)
    video = jitted(params, cfg, patches, ((2, 4, 6),))
    pictures = jitted(params, cfg, patches, ((1, 4, 6), (1, 4, 6)))
    np.testing.assert_array_equal(video, pictures)


@pytest.mark.parametrize(("height", "width", "size"), [(4, 6, 64), (10, 26, 512), (18, 16, 512)])
def test_padding_changes_nothing(
    height: int, width: int, size: int, params: Vision, cfg: VisionConfig
) -> None:
    patches = np.asarray(random_patches(cfg, height * width))
    where = layout(cfg, height, width, size)
    padded = jax.jit(encode_frame, static_argnames="cfg")(
        params, cfg, jnp.asarray(pad(patches, where)), where
    )
    plain = encode(params, cfg, jnp.asarray(patches), ((1, height, width),))
    assert padded.shape == (size // 4, cfg.out_hidden_size)
    assert error(padded[: len(plain)], np.asarray(plain)) < 2e-6


def test_blocks_of_queries_attend_to_all_keys(
    monkeypatch: pytest.MonkeyPatch, params: Vision, cfg: VisionConfig
) -> None:
    grid = (1, 18, 22)
    assert grid[1] * grid[2] > QUERY_BLOCK
    patches = random_patches(cfg, grid[1] * grid[2])
    in_blocks = encode(params, cfg, patches, (grid,))
    monkeypatch.setattr("jaxinfer.qwen.vision.QUERY_BLOCK", 10_000)
    at_once = encode(params, cfg, patches, (grid,))
    assert error(in_blocks, np.asarray(at_once)) < 2e-6


def test_bfloat16_stays_bfloat16_and_near(
    params: Vision, cfg: VisionConfig, cases: dict[str, np.ndarray]
) -> None:
    small = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    patches = jnp.asarray(cases["vision_images.pixel_values"])
    out = jitted(small, cfg, patches, grids_of(cases, "vision_images"))
    assert out.dtype == jnp.bfloat16
    assert error(out, cases["vision_images.features"]) < 0.03  # 8 bits through two blocks


def test_layers_may_be_stored_apart(
    params: Vision, cfg: VisionConfig, cases: dict[str, np.ndarray]
) -> None:
    fc1 = params.blocks.fc1.w
    apart = PerLayer((Dense(fc1[:1]), Dense(fc1[1:])), ((0, 0), (1, 0)))
    mixed = replace(params, blocks=replace(params.blocks, fc1=apart))
    patches = jnp.asarray(cases["vision_video.pixel_values"])
    out = encode(mixed, cfg, patches, grids_of(cases, "vision_video"))
    assert error(out, cases["vision_video.features"]) < 2e-6


def test_layout_meets_the_corners_of_the_table_in_merge_block_order(cfg: VisionConfig) -> None:
    where = layout(cfg, 4, 6)
    np.testing.assert_array_equal(
        where.coords[:8], [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    )
    np.testing.assert_allclose(where.weights.sum(axis=1), 1, rtol=1e-6)
    last = int(np.sqrt(cfg.num_position_embeddings)) - 1
    for patch, corner in [(0, 0), (-1, last * (last + 1) + last)]:
        assert where.taps[patch, 0] == corner
        assert where.weights[patch, 0] == 1


def test_unfit_input_is_refused(params: Vision, cfg: VisionConfig) -> None:
    patches = random_patches(cfg, 24)
    with pytest.raises(VisionInputError, match=r"patches \[16, 96\]; given \[24, 96\]"):
        encode(params, cfg, patches, ((1, 4, 4),))
    with pytest.raises(VisionInputError, match=r"\(1, 3, 8\).*multiples of 2"):
        encode(params, cfg, patches, ((1, 3, 8),))
    with pytest.raises(VisionInputError, match="0 grids"):
        encode(params, cfg, patches[:0], ())
    with pytest.raises(VisionInputError, match="does not fit into 16"):
        layout(cfg, 4, 6, 16)
    with pytest.raises(ValueError, match="not a square"):
        layout(replace(cfg, num_position_embeddings=35), 4, 6)
