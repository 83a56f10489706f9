"""Responses of the OpenAI routes."""

from msgspec import UNSET, Struct, UnsetType


class PromptDetails(Struct):
    """Tokens of a prompt that the prefix cache had."""

    cached_tokens: int


class UsageOut(Struct):
    """Tokens of a request: those of its prompt once, those of all its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Alternative(Struct):
    """Log probability of one token; `bytes` are the UTF-8 of what it stands for."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    """That of a generated token, and those of the likeliest ones at its place."""

    top_logprobs: list[Alternative]


class Logprobs(Struct):
    """Log probabilities of all generated tokens: of thoughts and markup, too."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionOut(Struct):
    """Name and arguments (JSON) of a call; in a stream, a fragment of them."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CallOut(Struct):
    """A tool call; in a stream, a fragment of one, told apart by `index`."""

    function: FunctionOut
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ReplyOut(Struct):
    """The assistant's message."""

    content: str | None
    reasoning_content: str | None
    tool_calls: list[CallOut] | UnsetType = UNSET
    role: str = "assistant"
    refusal: None = None


class ChoiceOut(Struct):
    """One of the answers of a response."""

    message: ReplyOut
    finish_reason: str
    logprobs: Logprobs | None = None
    index: int = 0


class ChatCompletion(Struct):
    """A response that is not streamed."""

    id: str
    created: int
    model: str
    choices: list[ChoiceOut]
    usage: UsageOut
    object: str = "chat.completion"


class DeltaOut(Struct):
    """What a piece of a stream adds to the message."""

    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallOut] | UnsetType = UNSET


class ChunkChoice(Struct):
    """The answer that a piece of a stream belongs to."""

    delta: DeltaOut
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    index: int = 0


class ChatChunk(Struct):
    """A piece of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageOut | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class ModelCard(Struct):
    """A model that is served; `max_model_len` is a language model's context in tokens."""

    id: str
    created: int
    max_model_len: int | UnsetType = UNSET
    object: str = "model"
    owned_by: str = "jaxinfer"


class ModelList(Struct):
    """All models that are served."""

    data: list[ModelCard]
    object: str = "list"
