"""What scenes are made of, the words for it, and the prompts made of those words.

A drawn thing has four attributes, each a class number: size, texture, colour and shape. A prompt
names some of them; whatever agrees with all that it names is what it asks for.
"""

from collections.abc import Iterator
from itertools import product
from random import Random

ANY = -1
"""Class of a word that leaves an attribute open."""

SIZES = (("small", "little"), ("big", "large"))
TEXTURES = (("plain",), ("striped",), ("dotted", "spotted"), ("chequered", "checkered"))
COLOURS = (
    ("red",), ("orange",), ("yellow",), ("green",), ("blue",), ("purple", "violet"), ("white",),
    ("black",),
)  # fmt: skip
SHAPES = (
    ("circle", "disc"), ("square",), ("triangle",), ("star",), ("ring",), ("cross",), ("heart",),
    ("moon",),
)  # fmt: skip
GENERIC_NOUNS = ("shape", "thing")
ATTRIBUTES = (SIZES, TEXTURES, COLOURS, SHAPES)
SIZE, TEXTURE, COLOUR, SHAPE = range(4)

OPENINGS = ("", "a", "the", "all")
VISUAL = "visual"
"""The prompt of pictures whose wanted things are shown by boxes alone."""

ABSENT_NOUNS = (
    "cat", "dog", "horse", "cow", "sheep", "bird", "fish", "mouse", "lion", "tiger", "bear",
    "elephant", "giraffe", "monkey", "rabbit", "frog", "snake", "spider", "bee", "duck", "chicken",
    "person", "man", "woman", "child", "face", "hand", "eye", "nose", "foot", "hair", "hat",
    "shirt", "shoe", "coat", "dress", "glove", "bag", "car", "bus", "train", "truck", "bicycle",
    "boat", "ship", "plane", "rocket", "wheel", "road", "bridge", "house", "tower", "castle",
    "door", "window", "wall", "roof", "fence", "chair", "table", "bed", "lamp", "clock", "mirror",
    "book", "pen", "pencil", "paper", "letter", "key", "coin", "knife", "fork", "spoon", "cup",
    "plate", "bottle", "glass", "bread", "cheese", "apple", "banana", "lemon", "grape", "cherry",
    "carrot", "potato", "cake", "egg", "flower", "rose", "tree", "leaf", "grass", "forest", "hill",
    "river", "lake", "sea", "beach", "rock", "cloud", "rain", "snow", "sun", "planet", "fire",
    "ball", "kite", "doll", "guitar", "piano", "drum", "phone", "screen", "keyboard", "camera",
    "robot", "rope", "box", "pyramid", "spiral", "arrow", "hexagon", "dragon",
)  # fmt: skip
"""Things that are never drawn, named while training."""

HELDOUT_NOUNS = (
    "zebra", "kangaroo", "penguin", "whale", "turtle", "butterfly", "wolf", "king", "tooth",
    "scarf", "tractor", "helicopter", "church", "stairs", "sofa", "candle", "umbrella", "hammer",
    "ladder", "basket", "pizza", "tomato", "mushroom", "sandwich", "mountain", "island", "desert",
    "violin", "trumpet", "laptop", "balloon", "octagon", "cylinder", "magnet",
)  # fmt: skip
"""Things that are never drawn and never named while training."""

PLACES = ("", "on a table", "in the garden", "with a hat", "in front of the house", "at night")
ABSENT_PROMPTS = 6000


def choices(attribute: int) -> tuple[tuple[str, int], ...]:
    """The words that may stand for an attribute, each with its class; for a shape, singulars."""
    words = tuple((w, c) for c, synonyms in enumerate(ATTRIBUTES[attribute]) for w in synonyms)
    if attribute == SHAPE:
        return (*words, *((noun, ANY) for noun in GENERIC_NOUNS))
    return (("", ANY), *words)


def plural(noun: str) -> str:
    """The plural of a noun of this world."""
    irregular = {
        "mouse": "mice", "sheep": "sheep", "fish": "fish", "person": "people", "man": "men",
        "woman": "women", "child": "children", "foot": "feet", "knife": "knives", "leaf": "leaves",
        "wolf": "wolves", "tooth": "teeth", "scarf": "scarves", "stairs": "stairs",
    }  # fmt: skip
    if noun in irregular:
        return irregular[noun]
    if noun.endswith(("s", "x", "ch", "sh", "ato")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def prompt_slots() -> tuple[tuple[str, ...], ...]:
    """The words of each slot of a prompt, in order: opening, size, texture, colour, noun.

    The nouns are all singulars, then all plurals.
    """
    nouns = tuple(word for word, _ in choices(SHAPE))
    adjectives = (tuple(word for word, _ in choices(a)) for a in (SIZE, TEXTURE, COLOUR))
    return (OPENINGS, *adjectives, (*nouns, *map(plural, nouns)))


def drawn_prompts() -> Iterator[str]:
    """Every prompt about things that are drawn; the last slot changes fastest."""
    for words in product(*prompt_slots()):
        yield " ".join(filter(None, words))


def drawn_meanings() -> Iterator[tuple[int, ...]]:
    """The classes that each of `drawn_prompts` names, in the order of `ATTRIBUTES`."""
    slots = [[meaning for _, meaning in choices(a)] for a in (SIZE, TEXTURE, COLOUR, SHAPE)]
    slots[-1] *= 2
    for _ in OPENINGS:
        yield from product(*slots)


def absent_prompts(nouns: tuple[str, ...], count: int, seed: int) -> list[str]:
    """Prompts about things that are never drawn, some of them with words for things that are."""
    random = Random(seed)
    openings, sizes, textures, colours, drawn = prompt_slots()
    prompts = []
    for _ in range(count):
        noun = random.choice(nouns)
        words = [random.choice(openings)]
        words += [
            random.choice(slot) for slot in (sizes, textures, colours) if random.random() < 0.3
        ]
        words.append(random.choice((noun, plural(noun))))
        if random.random() < 0.15:
            # "star house": the last noun says what is meant.
            words.insert(-1, random.choice(drawn[: len(drawn) // 2]))
        if random.random() < 0.15:
            words.append(random.choice(PLACES))
        prompts.append(" ".join(filter(None, words)))
    return prompts
