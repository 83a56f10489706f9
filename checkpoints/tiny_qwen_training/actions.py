"""Tools that do something: timers, orders, messages, lights, lists, the calendar."""

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


def timer(rng: Random) -> Offer:
    """A timer of some minutes, with a label that may be left out."""
    minutes_key = one(rng, "minutes|duration|duration_minutes")
    label_key = one(rng, "label|name|title")
    schema = schema_of(
        one(rng, "set_timer|start_timer|create_timer|timer"),
        one(rng, "Start a timer.|Set a countdown timer."),
        1,
        **{minutes_key: ("integer", "Length in minutes"), label_key: text_of("What it is for")},
    )

    def use() -> Use:
        minutes = rng.choice((1, 2, 3, 5, 8, 10, 12, 15, 20, 25, 30, 40, 45, 60, 90))
        label = one(rng, "tea|pasta|eggs|bread|laundry|nap|cake|") or world.made_up_word(rng)
        labelled = rng.random() < 0.5
        length = world.plural(minutes, "minute")
        called = f" called {label}" if labelled else ""
        return Use(
            f"set a timer for {length}{called}",
            {minutes_key: minutes} | ({label_key: label} if labelled else {}),
            {"status": "started", "minutes": minutes},
            f"The timer{called} is set for {length}.",
            (f"Start a {minutes} minute timer{called}.",),
            f"And another timer for {length}{called}.",
        )

    gap = Gap("Set a timer.", "For how many minutes should I set it?", minutes_key)
    return Offer(schema, "timers", use, gap)


def reminder(rng: Random) -> Offer:
    """A reminder with a text, a time and sometimes a day."""
    text_key, time_key = one(rng, "text|task|message|note"), one(rng, "time|at|when")
    schema = schema_of(
        one(rng, "create_reminder|add_reminder|remind|set_reminder"),
        one(rng, "Create a reminder.|Remind the user of something."),
        2,
        **{text_key: text_of("What to do"), time_key: text_of("Time as HH:MM")},
        day={"type": "string", "enum": list(world.DAYS)},
    )

    def use() -> Use:
        task = one(rng, "call|visit|pay|meet|write to") + " " + world.first_name(rng)
        if rng.random() < 0.5:
            task = "buy " + world.article(world.product(rng))
        time = world.clock_time(rng)
        day = rng.choice(world.DAYS) if rng.random() < 0.5 else ""
        when = f"on {day} at {time}" if day else f"at {time}"
        return Use(
            f"remind me to {task} {when}",
            {text_key: task, time_key: time} | ({"day": day} if day else {}),
            {"id": rng.randrange(10, 99), "saved": True},
            f"I will remind you to {task} {when}.",
            follow=f"And remind me to {task} {when}.",
        )

    return Offer(schema, "reminders", use)


def order(rng: Random) -> Offer:
    """An order with a quantity and gift wrapping."""
    item_key, count_key = one(rng, "item|product"), one(rng, "quantity|count|amount")
    wrap_key = one(rng, "gift_wrap|wrapped|as_gift")
    schema = schema_of(
        one(rng, "place_order|order_item|buy|create_order"),
        one(rng, "Order an item from the shop.|Place an order."),
        2,
        **{
            item_key: text_of("Item to order"),
            count_key: ("integer", "How many"),
            wrap_key: ("boolean", "Whether to wrap it as a gift"),
        },
    )

    def use() -> Use:
        name, count, reference = world.product(rng), rng.randrange(1, 13), world.code(rng)
        wrap = rng.choice((None, None, True, False))
        wish = {None: "", True: " with gift wrap", False: " without gift wrap"}[wrap]
        return Use(
            f"order {count} of the {name}{wish}",
            {item_key: name, count_key: count} | ({} if wrap is None else {wrap_key: wrap}),
            {"order": reference, "status": "confirmed"},
            f"I ordered {count} of the {name}{wish}. The order number is {reference}.",
            (f"Please buy {count} of the {name}{wish}.",),
            f"And order {count} of the {name}{wish}.",
        )

    gap = Gap(f"Order {rng.randrange(2, 9)} for me.", "What should I order?", item_key)
    return Offer(schema, "orders", use, gap)


def message(rng: Random) -> Offer:
    """A message to one or several people."""
    several = rng.random() < 0.4
    to_key = one(rng, "recipients|people") if several else one(rng, "to|recipient|person")
    text_key = one(rng, "text|body|content|message")
    to = array_of("string", "Who gets it") if several else text_of("Who gets it")
    schema = schema_of(
        one(rng, "send_message|message|send_text|notify"),
        one(rng, "Send a message.|Send a short text message."),
        2,
        **{to_key: to, text_key: text_of("The text")},
        urgent=("boolean", "Whether it is urgent"),
    )

    def use() -> Use:
        names = list(dict.fromkeys(world.first_name(rng) for _ in range(1 + 2 * several)))
        text = (
            one(
                rng,
                "I am late.|See you tomorrow.|Dinner is ready.|Please call me.|Happy birthday!|"
                "The train is late.|I am at home.|Thank you for the book.|Where are you?|",
            )
            or f"The code is {world.code(rng)}."
        )
        urgent = rng.random() < 0.3
        kind = "an urgent message" if urgent else "a message"
        arguments = {to_key: names if several else names[0], text_key: text}
        return Use(
            f'send {kind} to {world.listing(names)} saying "{text}"',
            arguments | ({"urgent": True} if urgent else {}),
            {"sent": True},
            f"I sent {kind} to {world.listing(names)}.",
            follow=f'And send {kind} to {world.listing(names)} saying "{text}"',
        )

    return Offer(schema, "messages", use)


def light(rng: Random) -> Offer:
    """Switch and brightness of a lamp."""
    room_key, on_key = one(rng, "room|location|area"), one(rng, "on|power|enabled")
    schema = schema_of(
        one(rng, "set_light|control_light|switch_light|lights"),
        "Control the light of a room.",
        2,
        **{
            room_key: {"type": "string", "enum": list(world.ROOMS[:5])},
            on_key: ("boolean", "On or off"),
            "brightness": ("integer", "Percent"),
        },
    )

    def use() -> Use:
        room, on = rng.choice(world.ROOMS[:5]), rng.random() < 0.6
        percent = rng.randrange(10, 101, 10) if on and rng.random() < 0.5 else 0
        state = "on" if on else "off"
        level = f" at {percent} percent" if percent else ""
        arguments = {room_key: room, on_key: on} | ({"brightness": percent} if percent else {})
        return Use(
            f"turn {state} the light in the {room}{level}",
            arguments,
            {"ok": True},
            f"The light in the {room} is now {state}{level}.",
            (f"Switch the {room} light {state}{level}.",),
            f"And turn {state} the light in the {room}{level}.",
        )

    return Offer(schema, "lights", use, Gap("Turn on the light.", "In which room?", room_key))


def heating(rng: Random) -> Offer:
    """Target temperature of a room, with halves of degrees."""
    room_key, degrees_key = one(rng, "room|zone"), one(rng, "degrees|temperature|target")
    schema = schema_of(
        one(rng, "set_temperature|set_heating|thermostat"),
        "Set the heating of a room.",
        **{room_key: text_of("The room"), degrees_key: ("number", "Degrees Celsius")},
    )

    def use() -> Use:
        room, degrees = rng.choice(world.ROOMS), rng.randrange(32, 50) / 2
        return Use(
            f"set the {room} to {degrees} degrees",
            {room_key: room, degrees_key: degrees},
            {"room": room, "target": degrees},
            f"The {room} is set to {degrees} degrees.",
            (f"Make the {room} {degrees} degrees warm.",),
            f"And set the {room} to {degrees} degrees.",
        )

    return Offer(schema, "heating", use)


def shopping_list(rng: Random) -> Offer:
    """Items added to a list."""
    key = one(rng, "items|products|entries")
    schema = schema_of(
        one(rng, "add_to_list|add_items|shopping_list_add"),
        "Add items to the shopping list.",
        **{key: array_of("string", "Items to add")},
    )

    def use() -> Use:
        names = list(dict.fromkeys(world.product(rng) for _ in range(rng.randrange(1, 5))))
        listed = world.listing(names)
        return Use(
            f"add {listed} to my shopping list",
            {key: names},
            {"added": len(names)},
            f"I added {listed} to your shopping list.",
            (f"Put {listed} on the shopping list.",),
            f"Also add {listed}.",
        )

    gap = Gap("Add something to my shopping list.", "What should I add?", key)
    return Offer(schema, "shopping lists", use, gap)


def event(rng: Random) -> Offer:
    """A calendar entry with guests and a nested place."""
    guests_key = one(rng, "guests|attendees|participants")
    place = {
        "type": "object",
        "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
        "required": ["street", "number"],
    }
    schema = schema_of(
        one(rng, "create_event|add_event|schedule_event|book_meeting"),
        "Create a calendar event.",
        **{"title": text_of("Title"), "day": text_of("Day of the week"),
           guests_key: array_of("string", "First names"), "address": place},
    )  # fmt: skip

    def use() -> Use:
        title = one(rng, "dinner|lunch|meeting|party|concert|chess|picnic")
        day = rng.choice(world.DAYS)
        street, number = rng.choice(world.STREETS), rng.randrange(1, 80)
        guests = list(dict.fromkeys(world.first_name(rng) for _ in range(rng.randrange(1, 4))))
        return Use(
            f"plan a {title} on {day} with {world.listing(guests)} at {street} {number}",
            {"title": title, "day": day, guests_key: guests,
             "address": {"street": street, "number": number}},
            {"created": True},
            f"The {title} with {world.listing(guests)} is planned for {day} at {street} {number}.",
        )  # fmt: skip

    return Offer(schema, "the calendar", use)
