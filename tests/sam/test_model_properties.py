"""What a user may rely on: other pictures, other prompts and padding change no result."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sam.model import Detections, Features, Prompts, embed_image, embed_text
from jaxinfer.sam.prepared import prepared
from tests.sam.helpers import (
    find,
    golden_cases,
    golden_config,
    golden_params,
    golden_prompts,
    look,
    read,
    rows,
)


@pytest.fixture(scope="module")
def features() -> Features:
    return look(golden_params(), golden_config(), jnp.asarray(golden_cases()["pixels"]))[1]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Words alone, words with boxes alike and unlike, and padding of both."""
    ids = jnp.asarray(golden_cases()["ids"])
    return golden_prompts(read(golden_params(), golden_config(), ids))


@pytest.fixture(scope="module")
def found(features: Features, prompts: Prompts) -> Detections:
    return detect(features, prompts)


def detect(features: Features, prompts: Prompts) -> Detections:
    return find(golden_params(), golden_config(), features, prompts)[0]


def assert_same(one: object, other: object) -> None:
    """Up to rounding."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4), one, other)


def test_a_picture_alone_has_the_features_it_has_among_others(features: Features) -> None:
    second = jnp.asarray(golden_cases()["pixels"][1:])
    alone = look(golden_params(), golden_config(), second)[1]
    assert_same(alone, rows(features, [1]))
    assert np.abs(alone.x1 - features.x1[0]).max() > 1, "the two pictures look alike"


@pytest.mark.parametrize("chosen", [[2, 0, 3, 1], [1, 1, 1, 3]])
def test_prompts_keep_their_order_and_do_not_mix(
    features: Features, prompts: Prompts, found: Detections, chosen: list[int]
) -> None:
    assert_same(detect(features, rows(prompts, chosen)), rows(found, chosen))
    assert np.ptp(found.logits, axis=0).min() > 1e-3, "prompts find the same"


def test_padding_changes_nothing(features: Features, prompts: Prompts, found: Detections) -> None:
    elsewhere = jnp.array([0.3, 0.6, 0.5, 0.2])
    other = replace(
        prompts,
        text=jnp.where(prompts.text_mask[..., None], prompts.text, 9.0),
        boxes=jnp.where(prompts.box_mask[..., None], prompts.boxes, elsewhere),
        box_labels=jnp.where(prompts.box_mask, prompts.box_labels, 1),
    )
    assert_same(detect(features, other), found)


def test_words_find_the_same_beside_prompts_with_boxes(
    features: Features, prompts: Prompts, found: Detections
) -> None:
    """The class token kept with the picture is the one that padded boxes lead to."""
    alone = detect(features, golden_prompts(prompts.text, boxes=False))
    has_boxes = np.asarray(prompts.box_mask.any(1))
    assert_same(rows(alone, [0]), rows(found, [0]))
    assert has_boxes.tolist() == [False, True, True, True]
    assert (np.abs(alone.logits - found.logits).max(1)[1:] > 1e-3).all(), "boxes do not matter"


def test_labels_of_boxes_matter(features: Features, prompts: Prompts, found: Detections) -> None:
    other = detect(features, replace(prompts, box_labels=1 - prompts.box_labels))
    change = np.abs(other.logits - found.logits).max(1)
    assert change[0] < 1e-4, "a prompt without boxes"
    assert (change[1:] > 1e-3).all()


def test_a_prompt_of_fewer_tokens_has_the_same_tokens() -> None:
    ids = jnp.asarray(golden_cases()["ids"])
    whole = read(golden_params(), golden_config(), ids)
    assert_same(read(golden_params(), golden_config(), ids[:, :4]), whole[:, :4])


def test_bfloat16_finds_nearly_the_same(prompts: Prompts, found: Detections) -> None:
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), golden_params())
    pixels, ids = (jnp.asarray(golden_cases()[name]) for name in ("pixels", "ids"))
    features = look(half, golden_config(), pixels)[1]
    asked = replace(prompts, text=read(half, golden_config(), ids))
    out = find(half, golden_config(), features, asked)[0]
    assert features.x4.dtype == asked.text.dtype == out.masks.dtype == jnp.bfloat16
    assert out.logits.dtype == out.boxes.dtype == out.presence.dtype == jnp.float32
    assert np.abs(out.boxes - found.boxes).max() < 0.05
    assert np.abs(out.scores - found.scores).max() < 0.05
    assert ((out.masks > 0) == (found.masks > 0)).mean() > 0.97


def test_a_picture_of_the_wrong_size_and_a_long_prompt_are_refused() -> None:
    cfg, params = golden_config(), golden_params()
    with pytest.raises(ValueError, match=r"uint8\[1, 40, 48, 3\]; resize them .* 48, 48, 3"):
        embed_image(params, cfg, jnp.zeros((1, 40, 48, 3), jnp.uint8))
    with pytest.raises(ValueError, match="float32"):
        embed_image(params, cfg, jnp.zeros((1, 48, 48, 3)))
    with pytest.raises(ValueError, match="9 tokens, the model takes 8"):
        embed_text(params, cfg, jnp.zeros((1, 9), jnp.int32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prepared_parameters_find_the_same(
    features: Features, prompts: Prompts, dtype: str
) -> None:
    """In bfloat16 too: what is converted beforehand would have been converted."""

    def cast(tree: Any) -> Any:
        wide = jnp.float32
        return jax.tree.map(lambda a: a.astype(dtype) if a.dtype == wide else a, tree)

    params, given = cast(golden_params()), (cast(features), cast(prompts))
    plain, ready = (find(p, golden_config(), *given)[0] for p in (params, prepared(params)))
    assert_same(*jax.tree.map(lambda a: np.asarray(a, np.float32), (ready, plain)))
