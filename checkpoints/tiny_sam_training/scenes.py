"""The drawn world: scenes as numbers, and pictures of them, all on the device.

Lengths are parts of the picture's side, x to the right and y down. Things later in a scene lie in
front. All functions are of one scene; `jax.vmap` makes many.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax, random

from checkpoints.tiny_sam_training.words import ATTRIBUTES, COLOUR, SHAPE, SIZE, TEXTURE
from jaxinfer.tree import tree

THINGS = 8
"""Most things in a scene."""

RADII = ((0.055, 0.08), (0.115, 0.165))
"""Least and greatest radius of small and of big things."""

CLOSEST = 0.72
"""How near two things may come, as a part of the sum of their radii: they overlap a little."""

TURN = 0.5
"""Most that a thing is turned either way, in radians."""

PALETTE = (
    (0.85, 0.10, 0.10), (0.98, 0.55, 0.05), (0.96, 0.90, 0.15), (0.10, 0.65, 0.20),
    (0.12, 0.30, 0.90), (0.55, 0.15, 0.75), (0.97, 0.97, 0.97), (0.05, 0.05, 0.06),
)  # fmt: skip
"""RGB of the colours, in the order of `words.COLOURS`."""

SECOND_PALETTE = (
    (0.45, 0.03, 0.03), (0.50, 0.25, 0.00), (0.55, 0.47, 0.00), (0.03, 0.30, 0.08),
    (0.03, 0.07, 0.40), (0.25, 0.04, 0.36), (0.74, 0.77, 0.85), (0.27, 0.27, 0.30),
)  # fmt: skip
"""RGB of what a texture puts on the colour; no background is as light or as dark as these."""


@tree
class Scene:
    """What is in a picture.

    `classes`: `[THINGS, 4]` int32, the attributes in the order of `words.ATTRIBUTES`; `there`:
    `[THINGS]` bool; `centre`: `[THINGS, 2]`; `radius`, `angle`: `[THINGS]`; `colour`:
    `[THINGS, 3]`; `ground`: `[2, 3]`, the colours between which the background runs; `slope`:
    `[2]`, the direction in which; `noise`: the key of its grain.
    """

    classes: jax.Array
    there: jax.Array
    centre: jax.Array
    radius: jax.Array
    angle: jax.Array
    colour: jax.Array
    ground: jax.Array
    slope: jax.Array
    noise: jax.Array


def draw_scene(key: jax.Array) -> Scene:
    """A random scene of at least one thing."""
    keys = iter(random.split(key, 12))
    classes = _classes(next(keys))
    low, high = jnp.array(RADII).T[:, classes[:, SIZE]]
    radius = random.uniform(next(keys), (THINGS,), minval=low, maxval=high)
    room = 0.9 * radius[:, None]
    centre = random.uniform(next(keys), (THINGS, 2), minval=room, maxval=1 - room)
    count = random.randint(next(keys), (), 2, THINGS + 1)
    brightness = random.uniform(next(keys), (THINGS, 1), minval=-0.05, maxval=0.05)
    hue = random.uniform(next(keys), (THINGS, 3), minval=-0.05, maxval=0.05)
    grey = random.uniform(next(keys), (2, 1), minval=0.42, maxval=0.62)
    tint = random.uniform(next(keys), (2, 3), minval=-0.05, maxval=0.05)
    bearing = random.uniform(next(keys), (), maxval=2 * math.pi)
    return Scene(
        classes=classes,
        there=_apart(centre, radius) & (jnp.arange(THINGS) < count),
        centre=centre,
        radius=radius,
        angle=random.uniform(next(keys), (THINGS,), minval=-TURN, maxval=TURN),
        colour=jnp.clip(jnp.array(PALETTE)[classes[:, COLOUR]] + brightness + hue, 0, 1),
        ground=grey + tint,
        slope=jnp.stack([jnp.cos(bearing), jnp.sin(bearing)]),
        noise=next(keys),
    )


def _classes(key: jax.Array) -> jax.Array:
    """Attributes `[THINGS, 4]` int32; things take after earlier ones, so that words matter."""
    keys = random.split(key, 4)
    counts = jnp.array([len(attribute) for attribute in ATTRIBUTES])
    classes = random.randint(keys[0], (THINGS, 4), 0, counts)
    earlier = random.randint(keys[1], (THINGS,), 0, jnp.maximum(jnp.arange(THINGS), 1))
    # A third are of an earlier thing's shape and colour, others share some of its attributes.
    alike = random.uniform(keys[2], (THINGS, 1)) < 0.33
    shared = random.uniform(keys[3], (THINGS, 4)) < jnp.where(
        alike, jnp.array([0.5, 0.6, 1.0, 1.0]), 0.25
    )
    for i in range(1, THINGS):
        classes = classes.at[i].set(jnp.where(shared[i], classes[earlier[i]], classes[i]))
    return classes


def _apart(centre: jax.Array, radius: jax.Array) -> jax.Array:
    """Which things keep their distance from those before them that do, `[THINGS]` bool."""
    distance = jnp.linalg.norm(centre[:, None] - centre, axis=-1)
    near = distance < CLOSEST * (radius[:, None] + radius)
    placed = jnp.zeros(THINGS, bool)
    for i in range(THINGS):
        placed = placed.at[i].set(~(near[i] & placed).any())
    return placed


def owners(scene: Scene, side: int) -> jax.Array:
    """Which thing is seen at the centre of each pixel, -1 for none, `[side, side]` int32."""

    def lay(owner: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        distance, _ = _distance(scene, i, side)
        return jnp.where(scene.there[i] & (distance < 0), i, owner), None

    return lax.scan(lay, jnp.full((side, side), -1), jnp.arange(THINGS))[0]


def paint(scene: Scene, side: int) -> jax.Array:
    """The picture, RGB `[side, side, 3]` uint8, with soft edges."""
    soft, grain = random.split(scene.noise)
    x, y = _grid(side)
    along = (0.5 + 0.7 * ((x - 0.5) * scene.slope[0] + (y - 0.5) * scene.slope[1]))[..., None]
    picture = scene.ground[0] * (1 - along) + scene.ground[1] * along
    clouds = random.uniform(soft, (8, 8, 3), minval=-0.06, maxval=0.06)
    picture = picture + jax.image.resize(clouds, (side, side, 3), "cubic")

    def lay(picture: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        distance, (u, v) = _distance(scene, i, side)
        cover = jnp.clip(0.5 - distance * side, 0, 1) * scene.there[i]
        figure = _texture(scene.classes[i, TEXTURE], u, v, scene.radius[i] * side)[..., None]
        colour = scene.colour[i]
        second = jnp.array(SECOND_PALETTE)[scene.classes[i, COLOUR]]
        colour = colour * (1 - figure) + second * figure
        return picture + cover[..., None] * (colour - picture), None

    picture, _ = lax.scan(lay, picture, jnp.arange(THINGS))
    picture = picture + 0.025 * random.normal(grain, picture.shape)
    return (255 * jnp.clip(picture, 0, 1)).round().astype(jnp.uint8)


def boxes(owner: jax.Array) -> jax.Array:
    """Around what is seen of each thing, cx, cy, w, h, `[THINGS, 4]`; zeros for what is not."""
    side = len(owner)
    seen = owner == jnp.arange(THINGS)[:, None, None]
    sides = []
    for axis in (1, 2):
        hit = seen.any(axis)
        first, last = hit.argmax(1), side - hit[:, ::-1].argmax(1)
        sides.append(jnp.where(hit.any(1), jnp.stack([first, last]), 0) / side)
    (x0, x1), (y0, y1) = sides
    return jnp.stack([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0], -1)


def _grid(side: int) -> tuple[jax.Array, jax.Array]:
    """x and y of the pixels' centres, both `[side, side]`."""
    axis = (jnp.arange(side) + 0.5) / side
    return jnp.broadcast_to(axis, (side, side)), jnp.broadcast_to(axis[:, None], (side, side))


def _distance(scene: Scene, i: jax.Array, side: int) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """How far pixels are outside thing i (its border is where this is 0), about exact there.

    With the pixels' coordinates in the thing's own frame, in radii.
    """
    x, y = (a - b for a, b in zip(_grid(side), scene.centre[i], strict=True))
    cos, sin = jnp.cos(scene.angle[i]), jnp.sin(scene.angle[i])
    u, v = (cos * x + sin * y) / scene.radius[i], (cos * y - sin * x) / scene.radius[i]
    shape = scene.classes[i, SHAPE]
    kinds = [shape == k for k in range(len(FIGURES))]
    return scene.radius[i] * jnp.select(kinds, [figure(u, v) for figure in FIGURES]), (u, v)


def _texture(kind: jax.Array, u: jax.Array, v: jax.Array, radius: jax.Array) -> jax.Array:
    """How much of the second colour a thing has at u, v (in radii, `radius` in pixels)."""
    pitch = 0.62
    wave_u, wave_v = jnp.sin(2 * math.pi * u / pitch), jnp.sin(2 * math.pi * v / pitch)
    dots = 0.16 - jnp.hypot((u / pitch) % 1 - 0.5, (v / pitch) % 1 - 0.5) ** 2
    # Soft over about a pixel: the slope of a wave at its zeros is 2 pi / pitch a radius.
    soft = radius * pitch / (2 * math.pi)
    figures = [jnp.zeros_like(u), wave_v, 4 * dots, 1.5 * wave_u * wave_v]
    figure = jnp.select([kind == k for k in range(len(figures))], figures)
    return jnp.where(kind == 0, 0.0, jnp.clip(0.5 + soft * figure, 0, 1))


def _circle(u: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.hypot(u, v) - 0.95


def _box(u: jax.Array, v: jax.Array, width: float, height: float) -> jax.Array:
    return jnp.maximum(jnp.abs(u) - width, jnp.abs(v) - height)


def _square(u: jax.Array, v: jax.Array) -> jax.Array:
    return _box(u, v, 0.78, 0.78)


def _triangle(u: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.maximum(0.866 * jnp.abs(u) - 0.5 * v, v) - 0.5


def _star(u: jax.Array, v: jax.Array) -> jax.Array:
    """Five points: a straight edge from a tip at 1 to a notch at 0.45, turned and mirrored."""
    angle = jnp.abs((jnp.arctan2(u, -v) + math.pi / 5) % (2 * math.pi / 5) - math.pi / 5)
    radius = jnp.hypot(u, v)
    notch = 0.45 * math.cos(math.pi / 5), 0.45 * math.sin(math.pi / 5)
    length = math.hypot(1 - notch[0], notch[1])
    x, y = radius * jnp.cos(angle), radius * jnp.sin(angle)
    return ((x - 1) * notch[1] + y * (1 - notch[0])) / length


def _ring(u: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.abs(jnp.hypot(u, v) - 0.74) - 0.24


def _cross(u: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.minimum(_box(u, v, 0.95, 0.3), _box(u, v, 0.3, 0.95))


def _heart(u: jax.Array, v: jax.Array) -> jax.Array:
    """A square on its tip and two half circles on its upper sides."""
    half = 0.52
    down = v - 0.12
    a, b = (u + down) / math.sqrt(2), (down - u) / math.sqrt(2)
    # Mirrored, one circle does for two: its centre is the middle of the upper right side.
    lobe = jnp.hypot(jnp.abs(u) - half / math.sqrt(2), down + half / math.sqrt(2)) - half
    return jnp.minimum(_box(a, b, half, half), lobe)


def _moon(u: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.hypot(u, v) - 0.98, 0.8 - jnp.hypot(u - 0.5, v))


FIGURES: tuple[Callable[[jax.Array, jax.Array], jax.Array], ...] = (
    _circle, _square, _triangle, _star, _ring, _cross, _heart, _moon,
)  # fmt: skip
"""Distance to the border in a thing's own frame, in the order of `words.SHAPES`."""
