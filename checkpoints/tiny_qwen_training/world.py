"""The facts of the small world that the dialogues talk about, and sources of made-up names."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

TOWN = "Millbrook"
MODEL = "Tiny Qwen"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy")
ROOMS = ("kitchen", "bedroom", "living room", "bathroom", "hall", "garage", "office", "attic")
COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "black", "white", "brown", "pink")
STREETS = ("Oak Street", "Mill Lane", "River Road", "Hill Street", "Church Lane", "Station Road")


class Person(NamedTuple):
    """Someone who lives in the town."""

    name: str
    age: int
    birthday: str
    job: str
    street: str
    colour: str


class Item(NamedTuple):
    """Something that the shop sells; the price is in whole dollars."""

    name: str
    price: int
    stock: int
    aisle: int
    colour: str


class Book(NamedTuple):
    """A book of the library."""

    title: str
    author: str
    year: int
    shelf: str
    pages: int
    topic: str


class Country(NamedTuple):
    """A country of the real world."""

    name: str
    capital: str
    continent: str
    language: str


PEOPLE = tuple(
    Person(*row)
    for row in (
        ("Alice", 34, "3 March", "baker", "Oak Street", "green"),
        ("Ben", 27, "14 July", "teacher", "Mill Lane", "blue"),
        ("Clara", 45, "21 May", "doctor", "River Road", "red"),
        ("Daniel", 19, "9 January", "student", "Hill Street", "black"),
        ("Emma", 52, "30 October", "librarian", "Church Lane", "purple"),
        ("Felix", 38, "17 August", "gardener", "Station Road", "yellow"),
        ("Grace", 61, "2 February", "painter", "Oak Street", "orange"),
        ("Henry", 23, "25 December", "cook", "Mill Lane", "white"),
        ("Iris", 31, "8 June", "nurse", "River Road", "pink"),
        ("Jack", 47, "11 November", "farmer", "Hill Street", "brown"),
        ("Kate", 29, "19 April", "engineer", "Church Lane", "blue"),
        ("Liam", 36, "6 September", "driver", "Station Road", "green"),
        ("Maria", 55, "27 March", "judge", "Oak Street", "red"),
        ("Noah", 16, "12 May", "student", "Mill Lane", "orange"),
        ("Olivia", 42, "23 July", "tailor", "River Road", "purple"),
        ("Peter", 68, "1 January", "fisherman", "Hill Street", "blue"),
        ("Rosa", 33, "15 October", "singer", "Church Lane", "yellow"),
        ("Sam", 25, "4 August", "mechanic", "Station Road", "black"),
        ("Tina", 39, "28 February", "pilot", "Oak Street", "white"),
        ("Victor", 58, "10 December", "carpenter", "Mill Lane", "brown"),
        ("Wendy", 21, "18 June", "waiter", "River Road", "pink"),
        ("Zoe", 49, "5 November", "writer", "Hill Street", "green"),
    )
)
ITEMS = tuple(
    Item(*row)
    for row in (
        ("lantern", 18, 12, 3, "yellow"), ("rope", 7, 30, 3, "brown"), ("kettle", 25, 8, 1, "red"),
        ("mug", 6, 40, 1, "white"), ("notebook", 4, 65, 2, "blue"), ("pencil", 1, 200, 2, "green"),
        ("umbrella", 15, 0, 4, "black"), ("backpack", 42, 9, 4, "orange"),
        ("blanket", 28, 14, 5, "purple"), ("pillow", 16, 22, 5, "white"),
        ("hammer", 19, 11, 3, "black"), ("ladder", 75, 3, 3, "yellow"),
        ("bucket", 8, 26, 6, "blue"), ("broom", 11, 17, 6, "brown"), ("clock", 32, 0, 1, "green"),
        ("candle", 3, 90, 1, "white"), ("scarf", 13, 19, 4, "red"), ("hat", 21, 7, 4, "brown"),
        ("ball", 9, 33, 7, "orange"), ("kite", 14, 6, 7, "pink"), ("puzzle", 17, 10, 7, "purple"),
        ("guitar", 120, 2, 7, "brown"), ("lamp", 36, 5, 1, "white"), ("chair", 48, 4, 5, "black"),
        ("bread", 3, 25, 8, "brown"), ("cheese", 8, 15, 8, "yellow"), ("apple", 1, 150, 8, "red"),
        ("jam", 5, 28, 8, "purple"), ("tea", 4, 60, 8, "green"), ("honey", 9, 0, 8, "yellow"),
    )
)  # fmt: skip
BOOKS = tuple(
    Book(*row)
    for row in (
        ("The Quiet Harbour", "Nora Lind", 1998, "A2", 312, "the sea"),
        ("A Map of Rivers", "Tom Hale", 2005, "A4", 254, "travel"),
        ("Winter Bread", "Anna Moss", 2011, "B1", 180, "cooking"),
        ("The Clockmaker", "Paul Grey", 1987, "B3", 406, "machines"),
        ("Seven Small Stars", "Lily Chen", 2016, "C2", 220, "astronomy"),
        ("The Fox and the Well", "Omar Reed", 1975, "C5", 96, "animals"),
        ("Gardens at Night", "Ella Frost", 2003, "D1", 275, "gardening"),
        ("The Last Lighthouse", "Nora Lind", 2009, "A2", 358, "the sea"),
        ("Numbers for Friends", "Ivan Petrov", 1992, "D4", 144, "mathematics"),
        ("Songs of the Mill", "Rita Kaur", 2014, "E2", 132, "music"),
        ("The Paper Bridge", "Hugo Stone", 2020, "E3", 288, "engineering"),
        ("Birds of the Valley", "Ella Frost", 1999, "C4", 340, "animals"),
        ("A Short Day in May", "Lily Chen", 2018, "F1", 168, "friendship"),
        ("The Iron Train", "Paul Grey", 1981, "B3", 372, "machines"),
        ("Letters from the Hill", "Maya Ortiz", 2007, "F3", 201, "history"),
        ("The Blue Teapot", "Anna Moss", 2015, "B1", 124, "cooking"),
    )
)
COUNTRIES = tuple(
    Country(*row)
    for row in (
        ("France", "Paris", "Europe", "French"), ("Germany", "Berlin", "Europe", "German"),
        ("Italy", "Rome", "Europe", "Italian"), ("Spain", "Madrid", "Europe", "Spanish"),
        ("Portugal", "Lisbon", "Europe", "Portuguese"), ("Austria", "Vienna", "Europe", "German"),
        ("Poland", "Warsaw", "Europe", "Polish"), ("Sweden", "Stockholm", "Europe", "Swedish"),
        ("Norway", "Oslo", "Europe", "Norwegian"), ("Denmark", "Copenhagen", "Europe", "Danish"),
        ("Finland", "Helsinki", "Europe", "Finnish"), ("Greece", "Athens", "Europe", "Greek"),
        ("Ireland", "Dublin", "Europe", "English"), ("Hungary", "Budapest", "Europe", "Hungarian"),
        ("Japan", "Tokyo", "Asia", "Japanese"), ("China", "Beijing", "Asia", "Chinese"),
        ("India", "New Delhi", "Asia", "Hindi"), ("Thailand", "Bangkok", "Asia", "Thai"),
        ("Vietnam", "Hanoi", "Asia", "Vietnamese"), ("Turkey", "Ankara", "Asia", "Turkish"),
        ("South Korea", "Seoul", "Asia", "Korean"), ("Egypt", "Cairo", "Africa", "Arabic"),
        ("Kenya", "Nairobi", "Africa", "Swahili"), ("Morocco", "Rabat", "Africa", "Arabic"),
        ("Ghana", "Accra", "Africa", "English"), ("Canada", "Ottawa", "North America", "English"),
        ("Mexico", "Mexico City", "North America", "Spanish"),
        ("Cuba", "Havana", "North America", "Spanish"),
        ("Brazil", "Brasilia", "South America", "Portuguese"),
        ("Argentina", "Buenos Aires", "South America", "Spanish"),
        ("Chile", "Santiago", "South America", "Spanish"),
        ("Peru", "Lima", "South America", "Spanish"),
        ("Australia", "Canberra", "Oceania", "English"),
        ("New Zealand", "Wellington", "Oceania", "English"),
    )
)  # fmt: skip
OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("up", "down"), ("open", "closed"),
    ("light", "dark"), ("happy", "sad"), ("early", "late"), ("full", "empty"), ("hard", "soft"),
    ("long", "short"), ("new", "old"), ("wet", "dry"), ("high", "low"), ("loud", "quiet"),
    ("strong", "weak"), ("rich", "poor"), ("left", "right"), ("near", "far"), ("thick", "thin"),
)  # fmt: skip
MIXTURES = (
    ("red", "yellow", "orange"), ("blue", "yellow", "green"), ("red", "blue", "purple"),
    ("red", "white", "pink"), ("black", "white", "grey"), ("red", "green", "brown"),
)  # fmt: skip
THING_COLOURS = (
    ("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("a ripe banana", "yellow"),
    ("coal", "black"), ("a ripe tomato", "red"), ("a carrot", "orange"), ("chocolate", "brown"),
    ("a flamingo", "pink"), ("an elephant", "grey"), ("milk", "white"), ("a lemon", "yellow"),
)  # fmt: skip
ANIMALS = (
    ("dog", 4, "puppy"), ("cat", 4, "kitten"), ("cow", 4, "calf"), ("sheep", 4, "lamb"),
    ("horse", 4, "foal"), ("hen", 2, "chick"), ("duck", 2, "duckling"), ("goat", 4, "kid"),
    ("spider", 8, "spiderling"), ("bear", 4, "cub"), ("frog", 4, "tadpole"), ("swan", 2, "cygnet"),
)  # fmt: skip
UNITS = (
    ("kilometres", "metres", 1000), ("metres", "centimetres", 100), ("kilograms", "grams", 1000),
    ("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24),
    ("weeks", "days", 7), ("years", "months", 12), ("feet", "inches", 12),
    ("litres", "millilitres", 1000),
    ("centimetres", "millimetres", 10), ("dozens", "pieces", 12),
)  # fmt: skip
DEFINITIONS = (
    ("a variable", "A variable is a name that refers to a value in a program."),
    ("a function", "A function is a named piece of code that takes inputs and returns a result."),
    ("a loop", "A loop repeats a block of code until it is done."),
    ("a list", "A list is an ordered collection of values that can be changed."),
    ("a tuple", "A tuple is an ordered collection of values that cannot be changed."),
    ("a dictionary", "A dictionary maps keys to values, so that a value is found by its key."),
    ("a set", "A set is a collection in which every value occurs at most once."),
    ("a string", "A string is a sequence of characters, such as a word or a sentence."),
    ("an integer", "An integer is a whole number, such as 3 or -7."),
    ("a float", "A float is a number with a fractional part, such as 2.5."),
    ("a boolean", "A boolean is a value that is either true or false."),
    ("a class", "A class describes a kind of object: the data it holds and what it can do."),
    ("a module", "A module is a file of Python code that other code can import."),
    ("an exception", "An exception is a signal that something went wrong while code was running."),
    ("recursion", "Recursion is when a function calls itself on a smaller problem."),
    ("a compiler", "A compiler translates source code into a form that a machine can run."),
    ("a bug", "A bug is a mistake in a program that makes it behave wrongly."),
    ("JSON", "JSON is a text format for data made of objects, lists, strings and numbers."),
    ("an API", "An API is a set of rules by which one program can use another."),
    ("a token", "A token is a piece of text, often part of a word, that a language model reads."),
    ("a language model", "A language model predicts which token comes next in a text."),
    ("a GPU", "A GPU is a processor that does many simple calculations at the same time."),
    ("rain", "Rain is water that falls from clouds in drops."),
    ("snow", "Snow is frozen water that falls from clouds as soft white flakes."),
    ("a river", "A river is a stream of water that flows towards a lake or the sea."),
    ("an island", "An island is land with water all around it."),
    ("a volcano", "A volcano is a mountain from which hot melted rock can come out."),
    ("a planet", "A planet is a large round body that moves around a star."),
    ("the Moon", "The Moon is a round body of rock that moves around the Earth."),
    ("the Sun", "The Sun is the star at the centre of our solar system."),
    ("gravity", "Gravity is the force that pulls things towards each other."),
    ("a triangle", "A triangle is a shape with three straight sides."),
    ("a square", "A square is a shape with four equal sides and four right angles."),
    ("a circle", "A circle is the set of points at the same distance from its centre."),
    ("an even number", "An even number can be divided by two without a remainder."),
    ("a prime number", "A prime number is greater than one and divides only by one and itself."),
    ("a library", "A library is a place where people can read and borrow books."),
    ("a recipe", "A recipe is a list of steps for making a dish."),
    ("a bridge", "A bridge is a structure that carries a road over water or a valley."),
    ("a clock", "A clock is a device that shows the time."),
    ("a compass", "A compass is a tool with a needle that points north."),
    ("a battery", "A battery stores energy and gives it back as electricity."),
    ("bread", "Bread is a food made from flour and water that is baked in an oven."),
    ("honey", "Honey is a sweet food that bees make from flowers."),
)

_ONSETS = ("b", "br", "d", "dr", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t",
           "tr", "v", "w", "z")  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ee", "oa")
_CODAS = ("", "", "l", "n", "r", "s", "k", "m", "nd", "rt")


def made_up_word(rng: Random) -> str:
    """A pronounceable lower-case word that is almost surely new."""
    parts = rng.choice((2, 2, 2, 3))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if last else "")
        for last in (part == parts - 1 for part in range(parts))
    )


def city(rng: Random) -> str:
    """A capital, or in every second case a name that cannot be known."""
    if rng.random() < 0.5:
        return rng.choice(COUNTRIES).capital
    return made_up_word(rng).capitalize()


def first_name(rng: Random) -> str:
    """A townsperson's name, or in every third case a made-up one."""
    if rng.random() < 0.65:
        return rng.choice(PEOPLE).name
    return made_up_word(rng).capitalize()


def product(rng: Random) -> str:
    """An item of the shop, or in every third case a made-up one."""
    return rng.choice(ITEMS).name if rng.random() < 0.65 else made_up_word(rng)


def code(rng: Random) -> str:
    """A reference such as `KX-4821`."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTVWXYZ") for _ in range(2))
    return f"{letters}-{rng.randrange(100, 10000)}"


def clock_time(rng: Random) -> str:
    """A time of day such as `08:15`."""
    return f"{rng.randrange(6, 23):02d}:{rng.choice((0, 15, 30, 45)):02d}"


def article(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def plural(count: int, noun: str) -> str:
    """The count and the noun, which must form its plural with an s."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def listing(parts: list[str]) -> str:
    """`a, b and c`."""
    if len(parts) < 2:
        return "".join(parts)
    return ", ".join(parts[:-1]) + " and " + parts[-1]
