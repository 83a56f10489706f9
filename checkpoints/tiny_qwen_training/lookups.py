"""Tools that tell something: weather, stock, books, people, calculations, made-up registers."""

from __future__ import annotations

from random import Random

from checkpoints.tiny_qwen_training import world
from checkpoints.tiny_qwen_training.tool_types import (
    Gap,
    Offer,
    Use,
    array_of,
    one,
    schema_of,
    text_of,
)


def weather(rng: Random) -> Offer:
    """Temperature and sky of a city, in a unit that may be left out."""
    place = one(rng, "city|location|place|town")
    with_unit = rng.random() < 0.4
    unit_property = {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}
    schema = schema_of(
        one(rng, "get_weather|get_current_weather|weather|fetch_weather|weather_lookup"),
        one(rng, "Get the current weather.|Current weather of a city.|Look up the weather."),
        1,
        **{place: text_of(one(rng, "The city|Name of the city"))},
        **(unit_property if with_unit else {}),
    )

    def use() -> Use:
        city = world.city(rng)
        sky, degrees = rng.choice(world.SKIES), rng.randrange(-5, 36)
        unit = one(rng, "celsius|fahrenheit") if with_unit and rng.random() < 0.5 else ""
        if unit == "fahrenheit":
            degrees = degrees * 2 + 30
        scale = "F" if unit == "fahrenheit" else "C"
        suffix = f" in {unit.capitalize()}" if unit else ""
        arguments = {place: city} | ({"unit": unit} if unit else {})
        result = {"temperature": degrees, "sky": sky}
        return Use(
            f"check the weather in {city}{suffix}",
            arguments,
            {place: city, **result} if rng.random() < 0.5 else result,
            f"It is {sky} in {city} with a temperature of {degrees} °{scale}.",
            (
                f"What is the weather in {city}{suffix}?",
                f"What's the weather like in {city}{suffix}?",
                f"How warm is it in {city}{suffix}?",
            ),
            f"And in {city}{suffix}?",
        )

    gap = Gap("What is the weather?", "Which city do you mean?", place)
    return Offer(schema, "the weather", use, gap)


def stock(rng: Random) -> Offer:
    """Price and number of an item in the shop."""
    key = one(rng, "item|product|article|item_name")
    schema = schema_of(
        one(rng, "check_stock|get_item|lookup_item|shop_stock|find_product"),
        one(rng, "Price and stock of an item.|Look up an item in the shop."),
        **{key: text_of("Name of the item")},
    )

    def use() -> Use:
        name = world.product(rng)
        known = next((item for item in world.ITEMS if item.name == name), None)
        price = known.price if known else rng.randrange(1, 100)
        count = known.stock if known else rng.choice((0, rng.randrange(1, 50)))
        left = f"There are {count} in stock" if count != 1 else "There is 1 in stock"
        answer = f"{left} and the price is ${price}."
        if count == 0:
            answer = f"The shop has no {name} in stock at the moment. The price is ${price}."
        return Use(
            f"check the stock of the {name}",
            {key: name},
            {"price": price, "stock": count},
            answer if count == 0 else f"Yes, the shop has the {name}. {answer}",
            (f"Does the shop have {world.article(name)}?", f"Is the {name} in stock?"),
            f"And the {name}?",
        )

    gap = Gap("Is it in stock?", "Which item should I look up?", key)
    return Offer(schema, "the shop's stock", use, gap)


def books(rng: Random) -> Offer:
    """Author and shelf of a book."""
    key = one(rng, "title|book|book_title")
    schema = schema_of(
        one(rng, "find_book|search_library|lookup_book|get_book"),
        one(rng, "Find a book in the library.|Search the library by title."),
        **{key: text_of("Title of the book")},
    )

    def use() -> Use:
        book = rng.choice(world.BOOKS)
        title, author, shelf = book.title, book.author, book.shelf
        if rng.random() < 0.4:
            title = "The " + " ".join(world.made_up_word(rng).capitalize() for _ in range(2))
            author, shelf = world.made_up_word(rng).capitalize(), f"G{rng.randrange(1, 10)}"
        free = rng.random() < 0.7
        state = "It is available." if free else "It is lent out at the moment."
        return Use(
            f"find the book {title}",
            {key: title},
            {"author": author, "shelf": shelf, "available": free},
            f"{title} by {author} is on shelf {shelf}. {state}",
            (f"Where in the library is {title}?", f"Is {title} available in the library?"),
            f"And {title}?",
        )

    gap = Gap("Where is the book?", "Which book are you looking for?", key)
    return Offer(schema, "the library", use, gap)


def contacts(rng: Random) -> Offer:
    """Street and telephone number of a person."""
    key = one(rng, "name|person|contact|first_name")
    schema = schema_of(
        one(rng, "get_contact|find_person|lookup_person|contact_info"),
        one(rng, "Street and phone number of a person.|Look up a person."),
        **{key: text_of("First name")},
    )

    def use() -> Use:
        name = world.first_name(rng)
        known = next((person for person in world.PEOPLE if person.name == name), None)
        street = known.street if known else rng.choice(world.STREETS)
        phone = f"{rng.randrange(100, 1000)}-{rng.randrange(1000, 10000)}"
        return Use(
            f"look up the phone number of {name}",
            {key: name},
            {"street": street, "phone": phone},
            f"The phone number of {name} is {phone}. {name} lives in {street}.",
            (f"What is {name}'s phone number?", f"How can I reach {name}?"),
            f"And {name}?",
        )

    gap = Gap("I need a phone number.", "Whose phone number do you need?", key)
    return Offer(schema, "contacts", use, gap)


def sums(rng: Random) -> Offer:
    """The sum or the product of a list of numbers."""
    key = one(rng, "numbers|values|terms")
    adds = rng.random() < 0.6
    schema = schema_of(
        one(rng, "add_numbers|sum|calculate_sum") if adds else one(rng, "multiply|product_of"),
        "Add numbers." if adds else "Multiply numbers.",
        **{key: array_of("number", "The numbers")},
    )

    def use() -> Use:
        numbers = [rng.randrange(2, 1000 if adds else 20) for _ in range(rng.randrange(2, 5))]
        result = sum(numbers)
        if not adds:
            numbers = numbers[:2]
            result = numbers[0] * numbers[1]
        listed = world.listing([str(number) for number in numbers])
        noun, verb = ("sum", "add") if adds else ("product", "multiply")
        return Use(
            f"{verb} {listed}",
            {key: numbers},
            {"result": result},
            f"The {noun} of {listed} is {result}.",
            (f"What is the {noun} of {listed}?",),
            f"And {listed}?",
        )

    return Offer(schema, "calculations", use)


def convert(rng: Random) -> Offer:
    """A value from one unit to another."""
    value_key = one(rng, "value|amount|number")
    source_key, target_key = rng.choice(
        (("from_unit", "to_unit"), ("from", "to"), ("source", "target"))
    )
    schema = schema_of(
        one(rng, "convert_units|convert|unit_converter"),
        "Convert a value to another unit.",
        **{
            value_key: ("number", "The value"),
            source_key: text_of("Unit to convert from"),
            target_key: text_of("Unit to convert to"),
        },
    )

    def use() -> Use:
        source, target, factor = rng.choice(world.UNITS)
        value = rng.choice((rng.randrange(2, 50), rng.randrange(1, 20) + 0.5))
        result = value * factor
        result = int(result) if result == int(result) else result
        return Use(
            f"convert {value} {source} to {target}",
            {value_key: value, source_key: source, target_key: target},
            {"result": result},
            f"{value} {source} are {result} {target}.",
            (f"How many {target} are {value} {source}?",),
            f"And {value} {source} in {target}?",
        )

    return Offer(schema, "unit conversion", use)


def local_time(rng: Random) -> Offer:
    """The time of day in a city."""
    key = one(rng, "city|timezone_city|location")
    schema = schema_of(
        one(rng, "get_time|current_time|local_time|clock"),
        "Get the local time of a city.",
        **{key: text_of("The city")},
    )

    def use() -> Use:
        city, time = world.city(rng), f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
        return Use(
            f"tell me the time in {city}",
            {key: city},
            {"time": time} if rng.random() < 0.5 else time,
            f"It is {time} in {city}.",
            (f"What time is it in {city}?",),
            f"And in {city}?",
        )

    return Offer(schema, "the time", use, Gap("What time is it?", "In which city?", key))


def distance(rng: Random) -> Offer:
    """The distance between two cities."""
    first, second = rng.choice((("origin", "destination"), ("start", "end"), ("a", "b")))
    schema = schema_of(
        one(rng, "get_distance|distance|route_length"),
        "Distance between two cities in kilometres.",
        **{first: text_of("First city"), second: text_of("Second city")},
    )

    def use() -> Use:
        start, end, length = world.city(rng), world.city(rng), rng.randrange(20, 30000) / 10
        return Use(
            f"find the distance from {start} to {end}",
            {first: start, second: end},
            {"km": length},
            f"The distance from {start} to {end} is {length} km.",
            (f"How far is it from {start} to {end}?",),
            f"And from {start} to {end}?",
        )

    return Offer(schema, "distances", use)


def lookup(rng: Random) -> Offer:
    """A made-up tool with made-up fields, whose names can only be copied."""
    thing, field = world.made_up_word(rng), world.made_up_word(rng)
    key = one(rng, "code|id|key|reference|name") if rng.random() < 0.7 else world.made_up_word(rng)
    name = one(rng, "get|find|lookup|query|read") + "_" + thing
    schema = schema_of(name, f"Get the {field} of a {thing}.", **{key: text_of(f"The {key}")})

    def use() -> Use:
        reference = world.code(rng)
        value = rng.choice((rng.randrange(1, 1000), world.made_up_word(rng)))
        return Use(
            f"get the {field} of the {thing} {reference}",
            {key: reference},
            {field: value},
            f"The {field} of the {thing} {reference} is {value}.",
            (f"What is the {field} of the {thing} {reference}?",
             f"Call {name} with {key} {reference}."),
            f"And of {reference}?",
        )  # fmt: skip

    return Offer(schema, f"the {thing}", use, Gap(f"Get the {field}.", f"Which {key}?", key))
