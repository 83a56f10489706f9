"""An endless, seeded supply of conversations in the small world."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from checkpoints.tiny_qwen_training import world
from checkpoints.tiny_qwen_training.json_tasks import json_exchange
from checkpoints.tiny_qwen_training.skills import Exchange, exchanges
from checkpoints.tiny_qwen_training.tool_types import Json, Offer, Use, one
from checkpoints.tiny_qwen_training.tools import KINDS, offers
from jaxinfer.qwen.chat import ChatTemplate

HELDOUT_SEEDS = range(0, 1_000_000)
FIRST_TRAINING_SEED = HELDOUT_SEEDS.stop
_KNOWN_WITHOUT_TOOLS = {"calculations", "unit conversion", "the library"}


@dataclass(frozen=True)
class Conversation:
    """Messages as the template takes them, with the tools and switches of the conversation."""

    messages: list[Json]
    tools: list[Json] = field(default_factory=list)
    enable_thinking: bool = True
    preserve_thinking: bool = False

    def render(self, template: ChatTemplate) -> str:
        """The whole conversation as text, last answer included."""
        return template.render(
            self.messages,
            self.tools,
            add_generation_prompt=False,
            enable_thinking=self.enable_thinking,
            preserve_thinking=self.preserve_thinking,
        )

    def as_json(self) -> Json:
        """A plain object with the fields' names."""
        return asdict(self)


def generate(rng: Random) -> Conversation:
    """Draw one conversation of one to four user turns."""
    writer = _Writer(rng, thinking=rng.random() < 0.5)
    kind = rng.random()
    tools: list[Offer] = []
    if kind < 0.40:
        _plain(writer)
    elif kind < 0.55:
        _json(writer)
    elif kind < 0.60:
        _personal(writer)
    else:
        tools = _with_tools(writer)
    return Conversation(
        writer.messages,
        [offer.schema for offer in tools],
        writer.thinking,
        preserve_thinking=rng.random() < 0.25,
    )


def conversation(seed: int) -> Conversation:
    """The conversation of that number, the same on every machine."""
    return generate(Random(seed))


class _Writer:
    """Appends messages; leaves out thoughts when thinking is off; applies a style of answer."""

    def __init__(self, rng: Random, thinking: bool) -> None:
        self.rng = rng
        self.thinking = thinking
        self.messages: list[Json] = []
        self.prefix = ""
        self.suffix = ""

    @property
    def turns(self) -> int:
        """How often the user has spoken."""
        return sum(message["role"] == "user" for message in self.messages)

    def system(self, text: str) -> None:
        self.messages.append({"role": "system", "content": text})

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def assistant(self, thought: str, text: str, **fields: Any) -> None:
        reasoning = thought if self.thinking else ""
        message = {"role": "assistant", "content": text, "reasoning_content": reasoning}
        self.messages.append(message | fields)

    def answer(self, thought: str, text: str) -> None:
        """A final answer in prose, in the style that the system prompt demands."""
        if "\n" in text:
            parts = (self.prefix.strip(), text, self.suffix.strip())
            self.assistant(thought, "\n\n".join(filter(None, parts)))
        else:
            self.assistant(thought, self.prefix + text + self.suffix)

    def exchange(self, exchange: Exchange) -> None:
        self.user(exchange.user)
        self.answer(exchange.thought, exchange.answer)

    def call(self, thought: str, calls: list[tuple[Offer, Use]]) -> None:
        """Call the tools and append their replies."""
        said = "Let me check.|One moment.|I will do that." if self.rng.random() < 0.15 else ""
        functions = [
            {"type": "function", "function": {"name": offer.name, "arguments": use.arguments}}
            for offer, use in calls
        ]
        self.assistant(thought, one(self.rng, said), tool_calls=functions)
        for _, use in calls:
            self.reply(use.result)

    def reply(self, result: Any) -> None:
        """A tool's reply: text as it is, everything else as JSON."""
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        self.messages.append({"role": "tool", "content": text})


def _style(writer: _Writer) -> None:
    """Sometimes a system prompt; some of them ask for words around every answer."""
    rng = writer.rng
    draw = rng.random()
    if draw < 0.6:
        return
    if draw < 0.8:
        writer.system(one(
            rng,
            f"You are a helpful assistant.|You are {world.MODEL}.|Answer briefly.|"
            f"You are the assistant of the town of {world.TOWN}.|You are a friendly assistant.",
        ))  # fmt: skip
        return
    word = rng.choice((rng.choice(world.PEOPLE).name, world.made_up_word(rng).capitalize()))
    if draw < 0.9:
        writer.prefix = one(rng, "Dear {0}, |{0}: |Hello {0}! ").format(word)
        writer.system(f'Start every answer with "{writer.prefix.strip()}"')
    else:
        writer.suffix = one(rng, " Have a nice day, {0}!| {0}.| Yours, {0}").format(word)
        writer.system(f'End every answer with "{writer.suffix.strip()}"')


def _plain(writer: _Writer) -> None:
    """One to four exchanges without tools."""
    _style(writer)
    turns = writer.rng.choices((1, 2, 3), (6, 3, 1))[0]
    for _ in range(turns):
        for exchange in exchanges(writer.rng):
            writer.exchange(exchange)
            if writer.turns == 4:
                return


def _json(writer: _Writer) -> None:
    """One to three requests for JSON."""
    rng = writer.rng
    if rng.random() < 0.3:
        writer.system(one(
            rng,
            "You answer in JSON.|Reply with JSON only.|You are an API. Answer with a JSON object.",
        ))  # fmt: skip
    for _ in range(rng.choices((1, 2, 3), (7, 2, 1))[0]):
        exchange = json_exchange(rng)
        writer.user(exchange.user)
        writer.assistant(exchange.thought, exchange.answer)


def _personal(writer: _Writer) -> None:
    """Questions about the user and the day, answered from the system prompt."""
    rng = writer.rng
    name, city, day = world.first_name(rng), world.city(rng), rng.choice(world.DAYS)
    date = f"{rng.randrange(1, 29)} {rng.choice(world.MONTHS)} {rng.randrange(2020, 2030)}"
    number = world.code(rng)
    facts = [
        (f"The user's name is {name}.", "What is my name?|Do you know my name?",
         f"Your name is {name}."),
        (f"The user lives in {city}.", "Where do I live?|Which city do I live in?",
         f"You live in {city}."),
        (f"Today is {day}, {date}.", "What day is it today?|Which day is today?",
         f"Today is {day}, {date}."),
        (f"The customer number is {number}.", "What is my customer number?|Tell me my number.",
         f"Your customer number is {number}."),
    ]  # fmt: skip
    shown = rng.sample(facts, rng.randrange(2, 5))
    told = " ".join(statement for statement, _, _ in shown)
    writer.system(one(rng, "{0}|You are a helpful assistant. {0}").format(told))
    for statement, question, answer in rng.sample(shown, rng.randrange(1, len(shown) + 1)):
        writer.user(one(rng, question))
        writer.answer(f"The system prompt says: {statement}", answer)


def _with_tools(writer: _Writer) -> list[Offer]:
    """One to four turns with two to five tools at hand; returns the tools in their order."""
    rng = writer.rng
    _style(writer)
    offered = offers(rng, rng.choices((1, 2, 3, 4, 5), (2, 4, 3, 2, 1))[0])
    scenario = rng.choices(
        (_single, _parallel, _chained, _follow_up, _gap, _unsuitable, _failed, _tool_free),
        (37, 14, 6, 14, 9, 7, 5, 8),
    )[0]
    scenario(writer, offered)
    while writer.turns < 3 and rng.random() < 0.25:
        rng.choice((_single, _tool_free))(writer, offered)
    return offered


def _request(rng: Random, use: Use) -> str:
    """The use as a whole sentence of the user."""
    if use.questions and rng.random() < 0.5:
        return rng.choice(use.questions)
    return one(rng, "Can you {0}?|Please {0}{1}|{2}{1}|I want you to {0}{1}").format(
        use.ask, _full_stop(use.ask), _capitalise(use.ask)
    )


def _full_stop(text: str) -> str:
    """What ends the sentence: nothing if it ends with a quotation."""
    return "" if text.endswith('"') else "."


def _capitalise(text: str) -> str:
    return text[0].upper() + text[1:]


def _plan(rng: Random, offer: Offer) -> str:
    """A thought before a call."""
    keys = world.listing(list(offer.schema["function"]["parameters"]["properties"]))
    return one(
        rng,
        "The user asks about {1}. I will call {0}.|I need {0} for this.|"
        "The tool {0} can do this. It takes {2}.|This needs the tool {0}.",
    ).format(offer.name, offer.topic, keys)


def _conclude(writer: _Writer, text: str) -> None:
    """The answer once the replies are there."""
    thought = one(
        writer.rng,
        "The tool has answered. I can tell the user.|I have the result now.|"
        "The reply has all I need.",
    )
    writer.answer(thought, text)


def _single(writer: _Writer, offered: list[Offer]) -> None:
    """One request, one call, one answer."""
    offer = writer.rng.choice(offered)
    use = offer.use()
    writer.user(_request(writer.rng, use))
    writer.call(_plan(writer.rng, offer), [(offer, use)])
    _conclude(writer, use.answer)


def _parallel(writer: _Writer, offered: list[Offer]) -> None:
    """Several calls at once, of one tool or of several."""
    rng = writer.rng
    count = rng.choice((2, 2, 3))
    chosen = [rng.choice(offered)] * count
    if rng.random() < 0.5:
        chosen = rng.sample(offered, min(count, len(offered)))
    calls = [(offer, offer.use()) for offer in chosen]
    asked = world.listing([use.ask for _, use in calls])
    request = one(rng, "Please {0}{1}|{2}{1}")
    writer.user(request.format(asked, _full_stop(asked), _capitalise(asked)))
    names = world.listing(list(dict.fromkeys(offer.name for offer in chosen)))
    number = {1: "one call", 2: "two calls", 3: "three calls"}[len(calls)]
    writer.call(f"This needs {number}: {names}.", calls)
    _conclude(writer, " ".join(use.answer for _, use in calls))


def _chained(writer: _Writer, offered: list[Offer]) -> None:
    """Two calls, the second after the first one's reply."""
    rng = writer.rng
    first, second = rng.choice(offered), rng.choice(offered)
    before, after = first.use(), second.use()
    writer.user(f"First {before.ask}, then {after.ask}{_full_stop(after.ask)}")
    writer.call(f"I start with {first.name}.", [(first, before)])
    writer.call(f"That is done. Now I call {second.name}.", [(second, after)])
    _conclude(writer, f"{before.answer} {after.answer}")


def _follow_up(writer: _Writer, offered: list[Offer]) -> None:
    """A second request that leans on the first."""
    offer = writer.rng.choice(offered)
    first, second = offer.use(), offer.use()
    writer.user(_request(writer.rng, first))
    writer.call(_plan(writer.rng, offer), [(offer, first)])
    _conclude(writer, first.answer)
    writer.user(second.follow or _request(writer.rng, second))
    writer.call(f"The same again with other values, so I call {offer.name}.", [(offer, second)])
    _conclude(writer, second.answer)


def _gap(writer: _Writer, offered: list[Offer]) -> None:
    """A request without a required argument: ask back, then call."""
    offer = next((offer for offer in offered if offer.gap), None)
    if offer is None or offer.gap is None:
        _single(writer, offered)
        return
    gap, use = offer.gap, _minimal(offer)
    writer.user(gap.request)
    writer.answer(f"The tool {offer.name} needs {gap.parameter}, which is missing.", gap.clarify)
    value = use.arguments[gap.parameter]
    shown = world.listing(value) if isinstance(value, list) else str(value)
    writer.user(one(writer.rng, "{0}|{0}, please.|{0}.").format(shown))
    writer.call(f"Now I know {gap.parameter}. I can call {offer.name}.", [(offer, use)])
    _conclude(writer, use.answer)


def _minimal(offer: Offer) -> Use:
    """A use with the required arguments only."""
    required = offer.schema["function"]["parameters"]["required"]
    while True:
        use = offer.use()
        if list(use.arguments) == required:
            return use


def _unsuitable(writer: _Writer, offered: list[Offer]) -> None:
    """A request that none of the tools can serve."""
    rng = writer.rng
    topics = {offer.topic for offer in offered} | _KNOWN_WITHOUT_TOOLS
    missing = next(
        offer for kind in rng.sample(KINDS, len(KINDS)) if (offer := kind(rng)).topic not in topics
    )
    writer.user(_request(rng, missing.use()))
    thought = f"None of the tools is for {missing.topic}."
    writer.answer(thought, f"I am sorry, I have no tool for {missing.topic}.")


def _failed(writer: _Writer, offered: list[Offer]) -> None:
    """A tool that reports an error."""
    rng = writer.rng
    offer = rng.choice(offered)
    reason = one(rng, "not found|service unavailable|timeout|access denied|invalid value")
    use = offer.use()._replace(result={"error": reason})
    writer.user(_request(rng, use))
    writer.call(_plan(rng, offer), [(offer, use)])
    writer.answer("The tool reports an error.", f"I am sorry, the tool failed: {reason}.")


def _tool_free(writer: _Writer, offered: list[Offer]) -> None:
    """Exchanges that need no tool although some are offered."""
    for exchange in exchanges(writer.rng, tools_offered=bool(offered)):
        writer.exchange(exchange)
