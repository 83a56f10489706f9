"""Questions that the little model answers by itself, each with a short thought."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from checkpoints.tiny_qwen_training import world
from checkpoints.tiny_qwen_training.snippets import SNIPPETS, Snippet
from checkpoints.tiny_qwen_training.tool_types import one


class Exchange(NamedTuple):
    """What the user says, what the model thinks about it, and what it answers."""

    user: str
    thought: str
    answer: str


Skill = Callable[[Random], list[Exchange]]


def greeting(rng: Random) -> list[Exchange]:
    """Hello, thanks, farewell, and who is there."""
    me = f"I am {world.MODEL}, a very small language model that knows the town of {world.TOWN}."
    able = "I can answer short questions, do small sums, write short Python functions, use tools "
    user, answers = rng.choice((
        ("Hello!|Hi|Hello|Hi there!|Good morning!|Hey", "Hello! How can I help you?|Hi! What can "
         "I do for you?|Hello! What would you like to know?"),
        ("Thank you!|Thanks|Thanks a lot!", "You are welcome!|You're welcome! Anything else?"),
        ("Goodbye!|Bye|See you!", "Goodbye! Have a nice day.|See you soon!"),
        ("How are you?|How are you today?", "I am fine, thank you. How can I help you?"),
        ("Who are you?|What are you?|What is your name?|Tell me about yourself.", me),
        ("What can you do?|How can you help me?|Help", able + "and answer in JSON."),
    ))  # fmt: skip
    thought = one(rng, "A short friendly reply is enough.|I should reply politely.")
    return [Exchange(one(rng, user), thought, one(rng, answers))]


def country(rng: Random) -> list[Exchange]:
    """Capital, continent and language, with a second question that leans on the first."""
    kind = rng.randrange(4)
    questions = (
        "What is the capital of {0}?|Which city is the capital of {0}?|Name the capital of {0}.|"
        "Tell me the capital of {0}.|{0}'s capital?",
        "On which continent is {0}?|Which continent is {0} on?|Where is {0}?",
        "Which language is spoken in {0}?|What language do people speak in {0}?",
        "{1} is the capital of which country?|Which country has the capital {1}?",
    )
    answers = (
        "The capital of {0} is {1}.", "{0} is in {2}.", "The main language of {0} is {3}.",
        "{1} is the capital of {0}.",
    )  # fmt: skip
    first, second = rng.sample(world.COUNTRIES, 2)
    exchanges = [
        Exchange(
            one(rng, questions[kind]).format(*first),
            f"This is about {first.name}. I know that "
            + answers[kind].format(*first).replace("The ", "the ", 1),
            answers[kind].format(*first),
        )
    ]
    if kind < 3 and rng.random() < 0.4:
        follow = one(rng, "And {0}?|What about {0}?").format(second.name)
        thought = f"The same question, now about {second.name}."
        exchanges.append(Exchange(follow, thought, answers[kind].format(*second)))
    return exchanges


def person(rng: Random) -> list[Exchange]:
    """A fact about someone in town, or who of two is older."""
    who, other = rng.sample(world.PEOPLE, 2)
    if rng.random() < 0.2:
        older = max(who, other, key=lambda person: person.age)
        return [
            Exchange(
                f"Who is older, {who.name} or {other.name}?",
                f"{who.name} is {who.age} and {other.name} is {other.age}. "
                f"The larger number is {older.age}.",
                f"{older.name} is older.",
            )
        ]
    facts = (
        ("How old is {0}?|What is {0}'s age?|Tell me the age of {0}.", "{0} is {1} years old."),
        ("When is {0}'s birthday?|When was {0} born?|What is the birthday of {0}?",
         "{0}'s birthday is on {2}."),
        ("What does {0} do?|What is {0}'s job?|What does {0} do for a living?", "{0} is a {3}."),
        ("Where does {0} live?|In which street does {0} live?", "{0} lives in {4}."),
        ("What is {0}'s favourite colour?|Which colour does {0} like best?",
         "{0}'s favourite colour is {5}."),
        ("Who is {0}?|Tell me about {0}.|What do you know about {0}?",
         "{0} is a {3} who lives in {4}. {0} is {1} years old."),
    )  # fmt: skip
    picked = rng.sample(facts, 1 + (rng.random() < 0.4))
    return [
        Exchange(
            one(rng, question).format(*who),
            f"The user asks about {who.name}, who lives in {world.TOWN}.",
            answer.format(*who).replace(" a engineer", " an engineer"),
        )
        for question, answer in picked
    ]


def shop(rng: Random) -> list[Exchange]:
    """Prices, totals, aisles and comparisons."""
    item, other = rng.sample(world.ITEMS, 2)
    name, kind = item.name, rng.randrange(5)
    if kind == 0:
        count = rng.randrange(2, 10)
        total = count * item.price
        question = one(rng, "How much do {1} of the {0} cost?|What is the price of {1} times {0}?")
        thought = f"The {name} costs ${item.price}. {count} times {item.price} is {total}."
        return [Exchange(question.format(name, count), thought, f"Together they cost ${total}.")]
    if kind == 1 and item.price != other.price:
        cheap = min(item, other, key=lambda item: item.price)
        question = f"What is cheaper, the {name} or the {other.name}?"
        thought = f"The {name} costs ${item.price} and the {other.name} costs ${other.price}."
        answer = f"The {cheap.name} is cheaper. It costs ${cheap.price}."
        return [Exchange(question, thought, answer)]
    question, answer = rng.choice((
        ("How much is the {0}?|What does the {0} cost?|What is the price of the {0}?",
         "The {0} costs ${1}."),
        ("Where do I find the {0}?|In which aisle is the {0}?", "The {0} is in aisle {3}."),
        ("Which colour is the {0}?|What colour does the {0} have?", "The {0} is {4}."),
    ))  # fmt: skip
    thought = f"The {name} is an item of the shop in {world.TOWN}."
    exchanges = [Exchange(one(rng, question).format(*item), thought, answer.format(*item))]
    if rng.random() < 0.3:
        follow = f"And the {other.name}?"
        thought = f"The same question about the {other.name}."
        exchanges.append(Exchange(follow, thought, answer.format(*other)))
    return exchanges


def book(rng: Random) -> list[Exchange]:
    """Facts about a book, or one to read about a topic."""
    chosen = rng.choice(world.BOOKS)
    question, answer = rng.choice((
        ("Who wrote {0}?|Who is the author of {0}?", "{0} was written by {1}."),
        ("When was {0} published?|From which year is {0}?", "{0} was published in {2}."),
        ("On which shelf is {0}?|Where do I find {0} in the library?", "{0} is on shelf {3}."),
        ("How many pages does {0} have?|How long is {0}?", "{0} has {4} pages."),
        ("What is {0} about?|What is the topic of {0}?", "{0} is a book about {5}."),
        ("Can you recommend a book about {5}?|I want to read about {5}.",
         "I recommend {0} by {1}. It is on shelf {3}."),
    ))  # fmt: skip
    thought = "I look for this book in the library of " + world.TOWN + "."
    return [Exchange(one(rng, question).format(*chosen), thought, answer.format(*chosen))]


def _sum_steps(a: int, b: int) -> str:
    """Addition by tens and ones."""
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    if a < 10 or b < 10:
        return f"{a} + {b} = {a + b}."
    return (
        f"{a // 10 * 10} + {b // 10 * 10} = {tens} and {a % 10} + {b % 10} = {ones}, "
        f"so {tens} + {ones} = {a + b}."
    )


def _difference_steps(a: int, b: int) -> str:
    """Subtraction of the tens, then of the ones."""
    tens, ones = b // 10 * 10, b % 10
    if not tens or not ones:
        return f"{a} - {b} = {a - b}."
    return f"{a} - {tens} = {a - tens}, then {a - tens} - {ones} = {a - b}."


def arithmetic(rng: Random) -> list[Exchange]:
    """Addition, subtraction and the multiplication table, with the result taken further."""
    kind = rng.randrange(3)
    a, b = rng.randrange(1, 100), rng.randrange(1, 100)
    if kind == 0:
        words, result, thought = ("+", "plus", "the sum of {0} and {1}"), a + b, _sum_steps(a, b)
    elif kind == 1:
        a, b = max(a, b), min(a, b)
        words, result = ("-", "minus", "the difference of {0} and {1}"), a - b
        thought = _difference_steps(a, b)
    else:
        a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        words, result = ("*", "times", "the product of {0} and {1}"), a * b
        thought = f"{a} times {b} is {a * b}."
    question = rng.choice((
        f"What is {a} {words[0]} {b}?", f"What is {a} {words[1]} {b}?", f"{a} {words[0]} {b} = ?",
        f"Calculate {a} {words[0]} {b}.", f"What is {words[2].format(a, b)}?",
        f"How much is {a} {words[1]} {b}?",
    ))  # fmt: skip
    exchanges = [Exchange(question, thought, f"{a} {words[0]} {b} = {result}")]
    if rng.random() < 0.3:
        more = rng.randrange(2, 30)
        follow = one(rng, "Add {0} to that.|And {0} more?|Plus {0}?").format(more)
        thought = "The last result was " + f"{result}. {_sum_steps(result, more)}"
        exchanges.append(Exchange(follow, thought, f"{result} + {more} = {result + more}"))
    return exchanges


def calendar(rng: Random) -> list[Exchange]:
    """Days of the week and months."""
    kind = rng.randrange(4)
    index, steps = rng.randrange(7), rng.randrange(2, 7)
    day = world.DAYS[index]
    if kind == 0:
        after = rng.random() < 0.5
        other = world.DAYS[(index + (1 if after else -1)) % 7]
        word = "after" if after else "before"
        question = one(rng, "Which day comes {1} {0}?|What day is {1} {0}?").format(day, word)
        return [Exchange(question, "I go through the week.", f"{other} comes {word} {day}.")]
    if kind == 1:
        path = [world.DAYS[(index + step) % 7] for step in range(steps + 1)]
        question = f"Today is {day}. Which day is it in {steps} days?"
        thought = "Counting from " + path[0] + ": " + ", ".join(path[1:]) + "."
        return [Exchange(question, thought, f"In {steps} days it is {path[-1]}.")]
    month = rng.randrange(12)
    name = world.MONTHS[month]
    if kind == 2:
        length = world.MONTH_LENGTHS[month]
        extra = " (29 in a leap year)" if month == 1 else ""
        question = one(rng, "How many days does {0} have?|How long is {0}?").format(name)
        answer = f"{name} has {length} days{extra}."
        return [Exchange(question, f"{name} is month {month + 1}.", answer)]
    following = world.MONTHS[(month + 1) % 12]
    question = one(rng, "Which month comes after {0}?|What is the month after {0}?").format(name)
    thought = f"{name} is month {month + 1}."
    return [Exchange(question, thought, f"{following} comes after {name}.")]


def units(rng: Random) -> list[Exchange]:
    """Whole numbers from a larger unit to a smaller one."""
    source, target, factor = rng.choice(world.UNITS)
    count = rng.randrange(2, 13)
    question = one(
        rng,
        "How many {1} are {2} {0}?|Convert {2} {0} to {1}.|What are {2} {0} in {1}?",
    ).format(source, target, count)
    one_unit = f"The factor from {source} to {target} is {factor}"
    thought = f"{one_unit}, and {count} times {factor} is {count * factor}."
    return [Exchange(question, thought, f"{count} {source} are {count * factor} {target}.")]


def small_facts(rng: Random) -> list[Exchange]:
    """Opposites, colours and animals."""
    kind = rng.randrange(5)
    if kind == 0:
        left, right = rng.sample(rng.choice(world.OPPOSITES), 2)
        question = one(rng, "What is the opposite of {0}?|Give me the opposite of {0}.")
        return [
            Exchange(
                question.format(left),
                f"The word {left} pairs with {right}.",
                f"The opposite of {left} is {right}.",
            )
        ]
    if kind == 1:
        first, second, result = rng.choice(world.MIXTURES)
        first, second = rng.sample((first, second), 2)
        question = one(rng, "What do {0} and {1} make?|Which colour do I get from {0} and {1}?")
        return [
            Exchange(
                question.format(first, second),
                "This is about mixing paint.",
                f"{first.capitalize()} and {second} make {result}.",
            )
        ]
    if kind == 2:
        thing, colour = rng.choice(world.THING_COLOURS)
        question = one(rng, "What colour is {0}?|Which colour does {0} have?").format(thing)
        return [Exchange(question, f"I think of {thing}.", f"{thing.capitalize()} is {colour}.")]
    animal, legs, young = rng.choice(world.ANIMALS)
    if kind == 3:
        question = f"How many legs does {world.article(animal)} have?"
        answer = f"{world.article(animal).capitalize()} has {legs} legs."
        return [Exchange(question, f"I picture {world.article(animal)}.", answer)]
    question = one(rng, "What is a young {0} called?|What do you call a baby {0}?").format(animal)
    return [Exchange(question, "Young animals have their own names.",
                     f"A young {animal} is called a {young}.")]  # fmt: skip


def definition(rng: Random) -> list[Exchange]:
    """What something is."""
    term, text = rng.choice(world.DEFINITIONS)
    question = one(
        rng,
        "What is {0}?|Explain what {0} is.|Can you explain {0}?|Define {0}.|"
        "Tell me what {0} is in one sentence.|Please explain {0} in simple words.",
    ).format(term)
    return [Exchange(question, f"A one-sentence explanation of {term} is enough.", text)]


def code_block(snippet: Snippet, name: str) -> str:
    """The function under that name, in a fenced block."""
    lines = [f"    {line}" if line else "" for line in snippet.body.split("\n")]
    return "\n".join(["```python", f"def {name}({snippet.parameters}):", *lines, "```"])


def python(rng: Random) -> list[Exchange]:
    """A short function, sometimes under a name that the user chooses."""
    snippet = rng.choice(SNIPPETS)
    name, called = snippet.name, ""
    if rng.random() < 0.25:
        name = one(rng, "do|my|run|calc|f") + "_" + world.made_up_word(rng)
        called = one(rng, " called {0}| named {0}").format(f"`{name}`")
    question = one(
        rng,
        "Write a Python function{0} that {1}.|Write a function{0} that {1}.|"
        "Please write a Python function{0} that {1}.|Give me a Python function{0} that {1}.|"
        "I need a function{0} in Python that {1}.|Can you write a Python function{0} that {1}?",
    ).format(called, snippet.does)
    intro = one(rng, "Here is the function:\n\n|Sure!\n\n||")
    return [Exchange(question, snippet.plan, intro + code_block(snippet, name))]


def numbers(rng: Random) -> list[Exchange]:
    """Sorting, extremes and positions in a given list."""
    values = rng.sample(range(1, 100), rng.randrange(3, 7))
    text = ", ".join(map(str, values))
    ordered = sorted(values)
    reverse = rng.random() < 0.3
    down = ordered[::-1] if reverse else ordered
    question, thought, answer = rng.choice((
        (f"Sort these numbers{' in descending order' if reverse else ''}: {text}",
         f"I start with {down[0]}, the {'largest' if reverse else 'smallest'}.",
         ", ".join(map(str, down))),
        (f"Which is the largest number: {text}?", f"I compare the numbers with {values[0]}.",
         f"The largest number is {ordered[-1]}."),
        (f"Which is the smallest number: {text}?", f"I compare the numbers with {values[0]}.",
         f"The smallest number is {ordered[0]}."),
        (f"What is the last number in this list: {text}?", "I read the list to its end.",
         f"The last number is {values[-1]}."),
        (f"How many numbers are in this list: {text}?", "I count them one by one.",
         f"The list has {len(values)} numbers."),
    ))  # fmt: skip
    return [Exchange(question, thought, answer)]


def copying(rng: Random) -> list[Exchange]:
    """Repeating given words, lists and codes exactly."""
    words = [world.made_up_word(rng) for _ in range(rng.randrange(2, 6))]
    kind = rng.randrange(4)
    if kind == 0:
        text, times = rng.choice((words[0], world.code(rng))), rng.randrange(2, 6)
        question = f"Say {text} {times} times."
        return [Exchange(question, f"I write {text} {times} times.", " ".join([text] * times))]
    if kind == 1:
        question = "Make a bullet list of: " + ", ".join(words)
        return [Exchange(question, "One line for each word.", "\n".join(f"- {w}" for w in words))]
    if kind == 2:
        question = "Number these words: " + ", ".join(words)
        lines = [f"{index}. {word}" for index, word in enumerate(words, 1)]
        return [Exchange(question, "One numbered line for each word.", "\n".join(lines))]
    text = f"{' '.join(words)} {world.code(rng)}"
    question = one(rng, "Repeat exactly: {0}|Repeat after me: {0}|Copy this text: {0}").format(text)
    return [Exchange(question, "I copy the text as it is.", text)]


def reading(rng: Random) -> list[Exchange]:
    """A question about a few sentences that stand in the prompt."""
    names = rng.sample([person.name for person in world.PEOPLE], 3)
    colours = rng.sample(world.COLOURS, 3)
    things = rng.sample(("key", "cup", "box", "coat", "bag", "letter", "ball", "lamp"), 3)
    places = rng.sample((*world.ROOMS, "garden", "shop", "library", "station"), 3)
    rows = list(zip(names, colours, things, places, strict=True))
    story = " ".join(
        f"{name} {verb} the {colour} {thing} {preposition} the {place}."
        for (name, colour, thing, place) in rows
        for verb, preposition in [rng.choice((("put", "in"), ("took", "to"), ("left", "in")))]
    )
    name, colour, thing, place = rng.choice(rows)
    question, answer = rng.choice((
        (f"Where is the {thing}?", f"The {thing} is in the {place}."),
        (f"Who had the {thing}?", f"{name} had the {thing}."),
        (f"Which colour is the {thing}?", f"The {thing} is {colour}."),
        (f"What did {name} have?", f"{name} had the {colour} {thing}."),
    ))  # fmt: skip
    thought = f"The text says that {name} had the {colour} {thing}, and the place is the {place}."
    return [Exchange(f"{story} {question}", thought, answer)]


def unknown(rng: Random) -> list[Exchange]:
    """Things that cannot be known: strangers, live data without a tool, gaps in a request."""
    word = world.made_up_word(rng)
    name = word.capitalize()
    question, thought, answer = rng.choice((
        (one(rng, "How old is {0}?|Where does {0} live?|Who is {0}?").format(name),
         f"I do not know a person called {name}.",
         f"I am sorry, I do not know anyone called {name}."),
        (one(rng, "How much is the {0}?|What does the {0} cost?").format(word),
         f"The shop has no item called {word}.",
         f"I am sorry, I do not know an item called {word}."),
        (f"What is the capital of {name}?", f"I do not know a country called {name}.",
         f"I am sorry, I do not know a country called {name}."),
        (one(rng, "What is the weather in {0}?|Will it rain in {0} today?").format(world.city(rng)),
         "The weather changes and I have no tool for it.",
         "I cannot look up the weather without a tool."),
        (one(rng, "What time is it?|What is the time now?"), "I have no clock and no tool for it.",
         "I cannot see the time without a tool."),
        (f"Convert {rng.randrange(2, 50)} for me.", "The units are missing.",
         "From which unit to which unit should I convert it?"),
        ("Write a Python function.", "It is not said what the function should do.",
         "What should the function do?"),
    ))  # fmt: skip
    return [Exchange(question, thought, answer)]


SKILLS: tuple[tuple[Skill, int], ...] = (
    (greeting, 3), (country, 5), (person, 6), (shop, 5), (book, 4), (arithmetic, 8), (calendar, 4),
    (units, 3), (small_facts, 4), (definition, 4), (python, 9), (numbers, 4), (copying, 4),
    (reading, 5), (unknown, 4),
)  # fmt: skip


TOOL_FREE_SKILLS: tuple[tuple[Skill, int], ...] = (
    (greeting, 3), (country, 4), (small_facts, 3), (definition, 3), (python, 4), (numbers, 2),
    (copying, 2), (reading, 2),
)  # fmt: skip


def exchanges(rng: Random, tools_offered: bool = False) -> list[Exchange]:
    """One or two exchanges about one thing; with tools offered, about one that needs none."""
    skills, weights = zip(*(TOOL_FREE_SKILLS if tools_offered else SKILLS), strict=True)
    return rng.choices(skills, weights)[0](rng)
