"""How the tiny segmentation checkpoint's answers are matched with the truth, and judged."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from checkpoints.sam import load
from checkpoints.tiny_sam_training.architecture import CONFIG
from checkpoints.tiny_sam_training.evaluate import overlap, summary
from checkpoints.tiny_sam_training.losses import (
    Candidates,
    generalised_iou,
    losses,
    mask_losses,
    match,
    naming,
)
from checkpoints.tiny_sam_training.matching import assign
from checkpoints.tiny_sam_training.train import TrainState, save, start
from checkpoints.tiny_sam_training.words import ANY, ATTRIBUTES
from jaxinfer.sam import trunk
from jaxinfer.sam.layers import differentiable

THINGS, QUERIES, SIDE = 4, 7, 24
assign_jit = jax.jit(assign)


@given(st.integers(0, 2**32 - 1), st.lists(st.booleans(), min_size=THINGS, max_size=THINGS))
def test_matching_is_the_best_there_is(seed: int, picks: list[bool]) -> None:
    costs = np.random.default_rng(seed).normal(size=(QUERIES, THINGS)).astype(np.float32)
    wanted = np.array(picks)
    found = np.asarray(assign_jit(costs, wanted))
    rows, columns = linear_sum_assignment(costs[:, wanted])
    assert len({*found[wanted]}) == wanted.sum()
    ours = costs[found[wanted], np.flatnonzero(wanted)].sum()
    np.testing.assert_allclose(ours, costs[:, wanted][rows, columns].sum(), rtol=1e-5, atol=1e-5)
    assert not found[~wanted].any()


def test_more_things_than_queries_are_refused() -> None:
    with pytest.raises(ValueError, match="5 things for 4 queries"):
        assign(jnp.zeros((4, 5)), jnp.ones(5, bool))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ((0.5, 0.5, 0.2, 0.2), 1.0),
        ((0.6, 0.5, 0.2, 0.2), 1 / 3),  # half of each, and no gap
        ((0.9, 0.5, 0.2, 0.2), -1 / 3),  # apart by their own size: a hull of 3
    ],
)
def test_generalised_iou(other: tuple[float, ...], expected: float) -> None:
    box = jnp.array((0.5, 0.5, 0.2, 0.2))
    np.testing.assert_allclose(generalised_iou(box, jnp.array(other)), expected, atol=1e-5)


@pytest.fixture
def truth() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Four squares, of which the first of two prompts wants two: boxes, owners, wanted."""
    owner = np.full((SIDE, SIDE), -1)
    corners = np.array([(1, 1), (13, 1), (1, 13), (13, 13)])
    for i, (x, y) in enumerate(corners):
        owner[y : y + 9, x : x + 9] = i
    boxes = np.concatenate([corners + 4.5, np.full((4, 2), 9)], 1) / SIDE
    wanted = np.array([[True, False, True, False], [False] * 4])
    things = jnp.broadcast_to(jnp.array(boxes, jnp.float32), (2, 4, 4))
    return things, jnp.broadcast_to(jnp.array(owner), (2, SIDE, SIDE)), jnp.array(wanted)


def perfect(things: jax.Array, wanted: jax.Array) -> Candidates:
    """One layer, whose queries 5 and 2 are the wanted things."""
    boxes = jnp.full((2, 1, QUERIES, 4), 0.3).at[0, 0, 5].set(things[0, 0])
    boxes = boxes.at[0, 0, 2].set(things[0, 2])
    logits = jnp.full((2, 1, QUERIES), -12.0).at[0, 0, jnp.array([5, 2])].set(12.0)
    presence = jnp.where(wanted.any(1), 12.0, -12.0)[:, None]
    return Candidates(jnp.zeros((2, 1, QUERIES, 8)), logits, boxes, presence)


def judge(
    found: Candidates, truth: tuple[jax.Array, jax.Array, jax.Array], sign: float = 1
) -> dict[str, jax.Array]:
    things, owner, wanted = truth
    matched = match(found, things, wanted)
    inside = owner[:, None] == jnp.arange(4)[:, None, None]
    masks = jnp.where(inside, 12.0, -12.0)[:, None] * sign
    union = (inside & wanted[..., None, None]).any(1)
    semantic = jnp.where(union, 12.0, -12.0) * sign
    parts = losses(found, matched, semantic, things, owner, wanted)
    return parts | mask_losses(masks, owner, wanted)


def test_a_right_answer_costs_nothing(truth: tuple[jax.Array, jax.Array, jax.Array]) -> None:
    found = perfect(truth[0], truth[2])
    assert match(found, truth[0], truth[2])[0, 0, jnp.array([0, 2])].tolist() == [5, 2]
    for name, part in judge(found, truth).items():
        np.testing.assert_allclose(part, 0, atol=1e-2, err_msg=name)


def test_each_error_costs_its_part(truth: tuple[jax.Array, jax.Array, jax.Array]) -> None:
    found = perfect(truth[0], truth[2])
    right = judge(found, truth)
    wrong = {
        "presence": judge(replace(found, presence=-found.presence), truth),
        "score": judge(replace(found, logits=found.logits.at[1, 0, 0].set(5)), truth),
        "l1": judge(replace(found, boxes=found.boxes + 0.1), truth),
        "giou": judge(replace(found, boxes=found.boxes + 0.1), truth),
        "mask": judge(found, truth, sign=-1),
        "dice": judge(found, truth, sign=-1),
        "semantic": judge(found, truth, sign=-1),
    }
    for name, parts in wrong.items():
        assert parts[name] > right[name] + 0.1, name


def test_naming_counts_what_is_known() -> None:
    sizes = [len(attribute) for attribute in ATTRIBUTES]
    right = np.concatenate([12.0 * np.eye(size)[1] for size in sizes])
    logits = jnp.stack([jnp.array(right), jnp.zeros(len(right))])
    assert naming(logits, jnp.array([[1, 1, 1, 1], [ANY] * 4])) < 1e-3
    # Of the second only the colour is known, of which nothing is told.
    expected = np.log(sizes[2]) / 5
    classes = jnp.array([[1, 1, 1, 1], [ANY, ANY, 3, ANY]])
    np.testing.assert_allclose(naming(logits, classes), expected, atol=1e-3)
    assert naming(logits, jnp.full((2, 4), ANY)) == 0


def test_attention_of_pictures_is_taught_in_bfloat16() -> None:
    qkv = jax.random.normal(jax.random.key(0), (16, 3 * 8))
    angles = jax.random.normal(jax.random.key(1), (16, 2))
    rotary = trunk.Rotary(jnp.cos(angles), jnp.sin(angles))

    def gradient(dtype: jnp.dtype) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            with differentiable():
                return jnp.square(trunk.attend(x.astype(dtype), rotary).astype(jnp.float32)).sum()

        return jax.grad(loss)(qkv)

    wanted, found = (gradient(jnp.dtype(dtype)) for dtype in (jnp.float32, jnp.bfloat16))
    for part in range(3):  # queries, keys, values
        a, b = (x[:, 8 * part : 8 * part + 8] for x in (wanted, found))
        assert jnp.linalg.norm(a - b) < 0.05 * jnp.linalg.norm(a)


def test_figures() -> None:
    masks = jnp.zeros((2, 8, 8), bool).at[0, :4].set(True).at[1, 2:6].set(True)
    np.testing.assert_allclose(overlap(masks, masks), [[1, 1 / 3], [1 / 3, 1]])
    wanted = np.array([[True, True], [False, False], [False, False]])
    kept = np.array([[True, True, False], [False] * 3, [True, False, False]])
    iou = np.array([[0.9, 0.3], [0, 0], [0, 0]])
    assert summary(kept, iou, wanted) == {
        "prompts": 3,
        "things": 2,
        "mean_iou": 0.9,
        "mean_iou_all": 0.6,
        "recall": 0.5,
        "precision": 0.3333,
        "absent": 2,
        "absent_rejected": 0.5,
    }
    assert summary(kept[:1], iou[:1], wanted[:1])["absent_rejected"] is None


def test_what_is_saved_takes_the_place_of_what_was(tmp_path: Path) -> None:
    """Training writes its weights now and then, the last time at its end."""
    taught = jax.eval_shape(partial(start, CONFIG), jax.random.key(0))
    for value in (1.0, 2.0):
        filled = jax.tree.map(lambda a, v=value: np.full(a.shape, v, a.dtype), taught)
        save(tmp_path, TrainState(filled, filled, ()))
    assert float(load(tmp_path)[1].neck.x1_conv1.weight.min()) == 2
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
