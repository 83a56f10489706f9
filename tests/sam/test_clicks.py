"""The click head against transformers, float32, on random parameters (see tests/goldens), and what
it promises about batches and padding."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sam import clicks
from jaxinfer.sam.clicks import Candidates, ClickFeatures, ClickPrompts, Clicks
from jaxinfer.sam.config import SAM3
from jaxinfer.sam.leaves import Leaf

GOLDEN = Path(__file__).parents[1] / "goldens" / "sam_clicks.npz"
pytestmark = pytest.mark.also_gpu
TOLERANCE = 1e-4
HEAD_PARAMETERS = 4_221_841  # of transformers' full-size model, memory parts left out
NECK_PARAMETERS = 6_949_632  # its three levels that are used
CASES = ["click", "points", "not_points", "box", "box_and_points", "mask", "mask_and_click"]

TINY = replace(
    SAM3,
    trunk=replace(SAM3.trunk, hidden_size=32, num_heads=2, image_size=84, window=3, table=3),
    width=32,
    num_heads=4,
    intermediate_size=64,
)

Cases = dict[str, np.ndarray]

embed = jax.jit(clicks.embed, static_argnums=1)
click = jax.jit(clicks.click, static_argnums=1)
best = jax.jit(clicks.best)


@pytest.fixture(scope="module", autouse=True)
def float32_products() -> Iterator[None]:
    """A GPU would multiply float32 in TF32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def golden() -> Cases:
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.fixture(scope="module")
def params(golden: Cases) -> Clicks:
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf.arrange(golden[leaf.name])), clicks.structure(TINY, "3")
    )


@pytest.fixture(scope="module")
def features(params: Clicks, golden: Cases) -> ClickFeatures:
    return embed(params, TINY, golden["trunk"])


def error(ours: jax.Array, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def prompts(golden: Cases, case: str) -> ClickPrompts:
    """A case's prompts, both pictures in one batch."""
    given = {
        key.removeprefix(f"{case}.input_"): value
        for key, value in golden.items()
        if key.startswith(f"{case}.input_")
    }
    count = len(given["masks"]) if "masks" in given else golden[f"{case}.present"].size
    points: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    if "points" in given:
        points.append(given["points"].reshape(count, -1, 2))
        labels.append(given["labels"].reshape(count, -1))
    if "boxes" in given:
        points.append(given["boxes"].reshape(count, 2, 2))
        labels.append(np.tile([clicks.TOP_LEFT, clicks.BOTTOM_RIGHT], (count, 1)))
    if case == "mask":  # transformers adds a point that is none, and pads behind it
        points.append(np.zeros((count, 1, 2)))
        labels.append(np.full((count, 1), clicks.NOT_A_POINT))
    return ClickPrompts(
        image=jnp.repeat(jnp.arange(2), count // 2),
        points=jnp.concatenate(points, axis=1) / TINY.trunk.image_size,
        labels=jnp.concatenate(labels, axis=1).astype(jnp.int32),
        masks=given["masks"][:, 0] if "masks" in given else None,
    )


def test_features(features: ClickFeatures, golden: Cases) -> None:
    assert error(features.s0, golden["s0"]) < TOLERANCE
    assert error(features.s1, golden["s1"]) < TOLERANCE
    assert error(features.x1, golden["x1"]) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_candidates(params: Clicks, features: ClickFeatures, golden: Cases, case: str) -> None:
    found = click(params, TINY, features, prompts(golden, case))
    masks, iou = golden[f"{case}.many.masks"], golden[f"{case}.many.iou"]
    assert error(found.masks[:, 1:].reshape(masks.shape), masks) < TOLERANCE
    assert error(found.iou[:, 1:].reshape(iou.shape), iou) < TOLERANCE
    present = golden[f"{case}.present"]
    assert error(found.present.reshape(present.shape), present) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_one_mask(params: Clicks, features: ClickFeatures, golden: Cases, case: str) -> None:
    found = click(params, TINY, features, prompts(golden, case))
    masks, iou = best(found)
    assert error(masks.reshape(golden[f"{case}.one.masks"].shape), golden[f"{case}.one.masks"]) < (
        TOLERANCE
    )
    assert error(iou.reshape(golden[f"{case}.one.iou"].shape), golden[f"{case}.one.iou"]) < (
        TOLERANCE
    )


def test_goldens_hold_stable_and_unstable_masks(golden: Cases) -> None:
    """Else `test_one_mask` would prove nothing about the choice."""
    one, many = golden["click.one.iou"], golden["click.many.iou"]
    unstable = (one == many).any(-1)
    assert 0 < unstable.sum() < unstable.size


def test_later_version_gives_iou_as_it_is(
    params: Clicks, features: ClickFeatures, golden: Cases
) -> None:
    earlier = click(params, TINY, features, prompts(golden, "click"))
    later = click(replace(params, version="3.1"), TINY, features, prompts(golden, "click"))
    np.testing.assert_allclose(jax.nn.sigmoid(later.iou), earlier.iou, rtol=1e-6)
    np.testing.assert_array_equal(later.masks, earlier.masks)


def test_ambiguous_prompt_gets_best_reading() -> None:
    """Also where its first candidate is stable; a clear one keeps it."""
    masks = jnp.arange(1.0, 9).reshape(2, 4, 1, 1) * jnp.ones((2, 4, 3, 3))
    iou = jnp.array([[0.9, 0.2, 0.7, 0.5]] * 2)
    found, estimate = best(Candidates(masks, iou, jnp.zeros(2)), jnp.array([True, False]))
    np.testing.assert_array_equal(found[:, 0, 0], [3, 5])
    np.testing.assert_allclose(estimate, [0.7, 0.9])


def test_stability() -> None:
    """10 pixels far inside, 5 within the margin, one outside; and a mask that is empty."""
    mask = jnp.array([1.0] * 10 + [0.01, -0.01, 0.04, -0.04, 0] + [-1])
    found = clicks.stability(jnp.stack([mask, jnp.full(16, -1.0)]).reshape(2, 4, 4))
    np.testing.assert_allclose(found, [10 / 15, 1])


@pytest.fixture(scope="module")
def mixed(golden: Cases) -> ClickPrompts:
    """A click, a box with a point, and an earlier mask alone, padded to one shape."""
    none = clicks.PADDING
    return ClickPrompts(
        image=jnp.array([1, 0, 1]),
        points=jnp.array(
            [
                [[0.3, 0.6], [0, 0], [0, 0], [0, 0]],
                [[0.2, 0.2], [0.7, 0.8], [0.5, 0.4], [0, 0]],
                [[9, 9], [math.inf, 1], [0, 0], [0, 0]],
            ]
        ),
        labels=jnp.array(
            [
                [clicks.POSITIVE, none, none, none],
                [clicks.TOP_LEFT, clicks.BOTTOM_RIGHT, clicks.NEGATIVE, none],
                [none] * 4,
            ]
        ),
        masks=jnp.asarray(golden["mask.input_masks"][[0, 0, 1], 0]),
        has_mask=jnp.array([False, False, True]),
    )


@pytest.mark.parametrize(("row", "count"), [(1, 3), (2, 0)])
def test_a_prompt_alone_gives_the_same(
    params: Clicks, features: ClickFeatures, mixed: ClickPrompts, row: int, count: int
) -> None:
    """Whatever it is batched with and however it is padded."""
    rows = slice(row, row + 1)
    alone = ClickPrompts(
        image=mixed.image[rows],
        points=mixed.points[rows, :count],
        labels=mixed.labels[rows, :count],
        masks=mixed.masks[rows] if mixed.has_mask[row] else None,
    )
    expected = click(params, TINY, features, alone)
    found = jax.tree.map(lambda x: x[rows], click(params, TINY, features, mixed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


def test_bfloat16(params: Clicks, features: ClickFeatures, golden: Cases) -> None:
    """Half precision works throughout and gives nearly the same, in float32."""
    exact = click(params, TINY, features, prompts(golden, "points"))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    half_features = embed(half, TINY, golden["trunk"].astype(jnp.bfloat16))
    assert {x.dtype for x in jax.tree.leaves(half_features)} == {jnp.dtype(jnp.bfloat16)}
    found = click(half, TINY, half_features, prompts(golden, "points"))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    assert error(found.masks, np.asarray(exact.masks)) < 0.05


@pytest.mark.parametrize("version", ["3", "3.1"])
def test_names(golden: Cases, version: clicks.Version) -> None:
    """As many tensors as the published files have; SAM 3's names are those that the oracle's
    parameters were renamed to."""
    leaves: list[Leaf] = jax.tree.leaves(clicks.structure(TINY, version))
    names = {leaf.name for leaf in leaves}
    assert len(names) == len(leaves) == 167
    if version == "3":
        weights = {n: x.shape for n, x in golden.items() if n.startswith(("tracker", "backbone"))}
        assert weights == {leaf.name: leaf.shape for leaf in leaves}
    else:
        older = {leaf.name for leaf in jax.tree.leaves(clicks.structure(TINY, "3"))}
        assert not names & older
        assert all(
            name.startswith(("backbone.vision_backbone.interactive_convs.", "tracker.model.inter"))
            for name in names
        )


def test_size() -> None:
    """Of the published model."""
    leaves = jax.tree.leaves(clicks.structure(SAM3, "3.1"))
    head = [leaf for leaf in leaves if leaf.name.startswith("tracker")]
    assert sum(math.prod(leaf.shape) for leaf in head) == HEAD_PARAMETERS
    assert sum(math.prod(leaf.shape) for leaf in leaves) == HEAD_PARAMETERS + NECK_PARAMETERS


def test_unknown_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'2'.*3 and 3\.1"):
        clicks.structure(SAM3, "2")  # pyright: ignore[reportArgumentType]


def test_mask_of_another_size_is_refused(
    params: Clicks, features: ClickFeatures, mixed: ClickPrompts
) -> None:
    with pytest.raises(ValueError, match=r"24 x 24.*got 96 x 96"):
        clicks.click(params, TINY, features, replace(mixed, masks=jnp.zeros((3, 96, 96))))
