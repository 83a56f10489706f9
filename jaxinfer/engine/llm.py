"""The Python API: a checkpoint in, text out."""

import json
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import jax
from rich.progress import Progress
from tokenizers import Tokenizer

from checkpoints import LoadReport, find, load, progress_bar, resolve
from jaxinfer.engine.engine import Engine, Request
from jaxinfer.engine.request import Chunk, Completion, RequestError, SamplingParams
from jaxinfer.engine.steps import SPECULATIONS, Plan
from jaxinfer.qwen.chat import ChatTemplate

Messages = Sequence[Mapping[str, Any]]

DEFAULT_CONTEXT = 8192
LONGEST_DRAFT = 16


class LLM:
    """A model ready to generate.

    Attributes:
        name: what it was loaded as.
        config: the model's configuration.
        tokenizer: the checkpoint's tokenizer.
        template: its chat template, or None if it has none.
        context: tokens that prompt and answer may have together.
        defaults: the sampling parameters that the checkpoint recommends.
        report: how long each stage of loading took.
        engine: what runs the requests.
    """

    def __init__(
        self,
        model: str | Path = "tiny_qwen",
        *,
        max_batch: int = 8,
        context: int | None = None,
        speculation: str | None = "auto",
        draft_length: int = 3,
        progress: bool = False,
    ) -> None:
        """Load a checkpoint.

        Args:
            model: a directory, or the name of a checkpoint that ships with the package.
            max_batch: requests decoded together; more wait.
            context: None for what the model was made for, at most `DEFAULT_CONTEXT`.
            speculation: "ngram" drafts from the text so far, "mtp" with the checkpoint's own head,
                "auto" with whichever promises more; None drafts nothing. The output is the same (on
                a GPU up to near-ties, for now).
            draft_length: tokens drafted a step.
            progress: show a bar while loading and while generating batches.

        Raises CheckpointError, ConfigError or FileNotFoundError for a checkpoint that cannot be
        loaded, ValueError for an option out of range.
        """
        if speculation not in (None, *SPECULATIONS):
            raise ValueError(f"speculation must be None or one of {SPECULATIONS}")
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch}")
        if not 1 <= draft_length <= LONGEST_DRAFT:
            raise ValueError(f"draft_length must be from 1 to {LONGEST_DRAFT}, not {draft_length}")
        directory = resolve(model)
        self.name, self._progress, self.report = str(model), progress, LoadReport()
        with progress_bar(f"loading {model}") if progress else nullcontext() as advance:
            self.config, params = load(
                directory, vision=False, progress=advance, report=self.report
            )
        longest = self.config.max_position_embeddings
        self.context = context or min(longest, DEFAULT_CONTEXT)
        if not 1 < self.context <= longest:
            raise ValueError(f"context must be from 2 to {longest}, not {self.context}")
        self.tokenizer = Tokenizer.from_file(str(_require(directory, "tokenizer.json")))
        self.template = _template(directory)
        generation = _json(find(directory, "generation_config.json"))
        self.defaults = _defaults(generation)
        if speculation in ("mtp", "auto") and params.mtp is None:
            speculation = "ngram" if speculation == "auto" else speculation
        if speculation == "mtp" and params.mtp is None:
            raise ValueError(f"{model} has no MTP head; use speculation='ngram' or None")
        known = min(self.tokenizer.get_vocab_size(), self.config.vocab_size)
        plan = Plan(self.config, speculation, draft_length if speculation else 0, known)
        self.engine = Engine(
            params, plan, self.tokenizer, _eos(generation), max_batch, self.context
        )
        self._inboxes: dict[Request, deque[tuple[Request, Chunk]]] = {}

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts (text, or token ids) and return one result each, in order.

        `params` is one for all or one each; by default the checkpoint's own. Raises RequestError
        before any work if one of the prompts cannot be served.
        """
        texts: Sequence[Any] = [prompts] if isinstance(prompts, str) else prompts
        each = [params] * len(texts) if not isinstance(params, Sequence) else params
        if len(each) != len(texts):
            raise ValueError(f"{len(texts)} prompts but {len(each)} sampling parameters")
        requests: list[Request] = []
        try:
            for text, chosen in zip(texts, each, strict=True):
                requests.append(self.submit(text, chosen))
        except BaseException as error:
            for request in requests:
                self.engine.cancel(request)
            if isinstance(error, RequestError):
                raise RequestError(f"prompt {len(requests)}: {error}") from error
            raise
        chunks: dict[Request, list[Chunk]] = {request: [] for request in requests}
        with (
            Progress(disable=not self._progress, transient=True) as bar,
            closing(self._run(requests)) as run,
        ):
            task = bar.add_task("generating", total=len(requests))
            for request, chunk in run:
                chunks[request].append(chunk)
                if chunk.finish_reason:
                    bar.advance(task)
        return [Completion.join(chunks[request]) for request in requests]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """Complete one prompt piece by piece. Closing the iterator cancels the request."""
        with closing(self._run([self.submit(prompt, params)])) as run:
            for _, chunk in run:
                yield chunk

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> Completion:
        """Answer a conversation in OpenAI's message form.

        `tools` are OpenAI tool definitions; `template_options` go to the chat template
        (`enable_thinking=False`, `preserve_thinking=True`). The text is what the model wrote,
        thoughts and tool calls included; `jaxinfer.qwen.messages.parse` takes it apart.
        """
        return self.generate([self.render(messages, tools, **template_options)], params)[0]

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> Iterator[Chunk]:
        """`chat`, piece by piece."""
        return self.stream(self.render(messages, tools, **template_options), params)

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant is to speak."""
        if self.template is None:
            raise RequestError(f"{self.name} has no chat template; use generate() instead")
        _only_text(messages)
        text = self.template.render(messages, tools, **template_options)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def submit(self, prompt: str | Sequence[int], params: SamplingParams | None) -> Request:
        """Queue a prompt with the engine, text or token ids."""
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        return self.engine.submit(prompt, params or self.defaults)

    def _run(self, requests: Sequence[Request]) -> Generator[tuple[Request, Chunk]]:
        """Step the engine until all of these have ended; cancels what has not when it is closed.

        What a step brings to other runs that are under way waits for them.
        """
        inbox: deque[tuple[Request, Chunk]] = deque()
        self._inboxes |= dict.fromkeys(requests, inbox)
        try:
            while inbox or any(not request.ended for request in requests):
                if inbox:
                    yield inbox.popleft()
                    continue
                for request, chunk in self.engine.step():
                    if request in self._inboxes:
                        self._inboxes[request].append((request, chunk))
        finally:
            for request in requests:
                del self._inboxes[request]
                if not request.ended:
                    self.engine.cancel(request)


def _only_text(messages: Messages) -> None:
    """Raise RequestError for a picture or a video: the template would make placeholders of them."""
    for number, message in enumerate(messages):
        parts = message.get("content")
        for part in parts if isinstance(parts, list | tuple) else ():
            if isinstance(part, Mapping) and "text" not in part:
                kind = part.get("type", next(iter(part), None))
                raise RequestError(
                    f"messages[{number}] holds a part of type {kind!r}; only text can be answered "
                    "yet: leave it out"
                )


def _require(directory: Path, name: str) -> Path:
    path = find(directory, name)
    if path is None:
        raise FileNotFoundError(f"{directory} has no {name}: copy it from the original checkpoint")
    return path


def _template(directory: Path) -> ChatTemplate | None:
    path = find(directory, "chat_template.jinja")
    return ChatTemplate.from_dir(path.parent) if path else None


def _json(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text()) if path else {}


def _defaults(generation: Mapping[str, Any]) -> SamplingParams:
    if not generation.get("do_sample", True):
        return SamplingParams(temperature=0.0)
    return SamplingParams(
        temperature=generation.get("temperature", 1.0),
        top_k=generation.get("top_k", 0),
        top_p=generation.get("top_p", 1.0),
    )


def _eos(generation: Mapping[str, Any]) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", ())
    return (eos,) if isinstance(eos, int) else tuple(eos)


def device_kind() -> str:
    """The device that generation runs on, as JAX names it."""
    return jax.devices()[0].device_kind
