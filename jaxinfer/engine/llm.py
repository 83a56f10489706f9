"""The Python API: a checkpoint in, text out."""

import json
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from rich.progress import Progress
from tokenizers import Tokenizer

from checkpoints import LoadReport, find, load, progress_bar, resolve
from jaxinfer.engine.build import KV_DTYPES, build_engine
from jaxinfer.engine.engine import Request
from jaxinfer.engine.request import Chunk, Completion, RequestError, SamplingParams
from jaxinfer.engine.slots import SPECULATIONS, Plan
from jaxinfer.qwen.chat import ChatTemplate
from jaxinfer.qwen.config import CHUNK
from jaxinfer.qwen.mode import usable_kernels

Messages = Sequence[Mapping[str, Any]]

DEFAULT_CONTEXT = 8192
LONGEST_DRAFT = 16
LARGEST_BATCH = 64
TURN = "<|im_start|>"
"""Begins a message in Qwen's chat format."""
THOUGHT = "</think>"
"""Ends the model's thoughts."""


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
        kv_dtype: str | None = None,
        prefix_cache: bool = True,
        cache_bytes: int | None = None,
        memory_fraction: float | None = None,
        prefill_budget: int | None = None,
        progress: bool = False,
    ) -> None:
        """Load a checkpoint.

        Args:
            model: a directory, or the name of a checkpoint that ships with the package.
            max_batch: requests decoded together; more wait.
            context: None for what the model was made for, at most `DEFAULT_CONTEXT`.
            speculation: "ngram" drafts from the text so far, "mtp" with the checkpoint's own head,
                "auto" with whichever promises more; None drafts nothing. The output is the same.
            draft_length: the most tokens drafted a step; fewer are if few are accepted.
            kv_dtype: "bf16" or "fp8" for keys and values; None for the model's own type.
            prefix_cache: keep what prompts have in common. The output is the same.
            cache_bytes: the most memory for what nobody uses at the moment; None for all that is
                free.
            memory_fraction: the part of the device's memory to use, parameters included; None for
                0.95 of a GPU's, or half of the host's.
            prefill_budget: tokens of prompts that are worked off between two decode calls, a
                multiple of 64: more brings first tokens sooner, fewer keeps streams smooth.
            progress: show a bar while loading and while generating batches.

        Raises CheckpointError, ConfigError or FileNotFoundError for a checkpoint that cannot be
        loaded, TooSmallError for a device without the memory, ValueError for an option out of
        range.
        """
        if speculation not in (None, *SPECULATIONS):
            raise ValueError(f"speculation must be None or one of {SPECULATIONS}")
        if not 1 <= max_batch <= LARGEST_BATCH:
            raise ValueError(f"max_batch must be from 1 to {LARGEST_BATCH}, not {max_batch}")
        if not 1 <= draft_length <= LONGEST_DRAFT:
            raise ValueError(f"draft_length must be from 1 to {LONGEST_DRAFT}, not {draft_length}")
        if cache_bytes is not None and cache_bytes < 0:
            raise ValueError(f"cache_bytes must be at least 0, not {cache_bytes}")
        if memory_fraction is not None and not 0 < memory_fraction <= 1:
            raise ValueError(
                f"memory_fraction must be above 0 and at most 1, not {memory_fraction}"
            )
        if kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype must be one of {tuple(KV_DTYPES)}, not {kv_dtype!r}")
        if prefill_budget is not None and (prefill_budget < CHUNK or prefill_budget % CHUNK):
            raise ValueError(f"prefill_budget must be a multiple of {CHUNK}, not {prefill_budget}")
        directory = resolve(model)
        self.name, self._progress, self.report = str(model), progress, LoadReport()
        with progress_bar(f"loading {model}") if progress else nullcontext() as advance:
            self.config, params = load(
                directory, vision=False, progress=advance, report=self.report
            )
        longest = self.config.max_position_embeddings
        self.context = min(longest, DEFAULT_CONTEXT) if context is None else context
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
        drafts = draft_length if speculation else 0
        kernels = usable_kernels(self.config, jax.default_backend())
        plan = Plan(self.config, speculation, drafts, known, kernels)
        self.engine = build_engine(
            params,
            plan,
            self.tokenizer,
            _eos(generation),
            slots=max_batch,
            context=self.context,
            kv_dtype=kv_dtype,
            prefix_cache=prefix_cache,
            cache_bytes=cache_bytes,
            memory_fraction=memory_fraction,
            prefill_budget=prefill_budget,
            turn=self.tokenizer.token_to_id(TURN),
        )
        self._inboxes: dict[Request, deque[tuple[Request, Chunk]]] = {}

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts (text, or token ids) and return the results in order.

        `params` is one for all or one each; by default the checkpoint's own. A prompt has `n`
        results, one after another. Raises RequestError before any work if one of the prompts cannot
        be served.
        """
        texts: Sequence[Any] = [prompts] if isinstance(prompts, str) else prompts
        each = [params] * len(texts) if not isinstance(params, Sequence) else params
        if len(each) != len(texts):
            raise ValueError(f"{len(texts)} prompts but {len(each)} sampling parameters")
        requests: list[Request] = []
        number = 0
        try:
            for number, (text, chosen) in enumerate(zip(texts, each, strict=True)):  # noqa: B007
                for one in answers(chosen or self.defaults):
                    requests.append(self.submit(text, one))
        except BaseException as error:
            for request in requests:
                self.engine.cancel(request)
            if isinstance(error, RequestError):
                raise RequestError(f"prompt {number}: {error}") from error
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
        thoughts and tool calls included; `jaxinfer.qwen.messages.parse` takes it apart. Structured
        output holds for what comes after the thoughts.
        """
        prompt = self.render(messages, tools, **template_options)
        return self.generate([prompt], self.after_thoughts(prompt, params))[0]

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> Iterator[Chunk]:
        """`chat`, piece by piece."""
        prompt = self.render(messages, tools, **template_options)
        return self.stream(prompt, self.after_thoughts(prompt, params))

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

    def after_thoughts(
        self, prompt: Sequence[int], params: SamplingParams | None
    ) -> SamplingParams:
        """Let structured output begin after the thoughts if the prompt ends within them."""
        params = params or self.defaults
        begin, end = (self.tokenizer.token_to_id(token) for token in ("<think>", THOUGHT))
        thinking = next((t == begin for t in reversed(prompt) if t in (begin, end)), False)
        if params.structured is None or params.structured.after or not thinking:
            return params
        return replace(params, structured=replace(params.structured, after=THOUGHT))

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


def answers(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the `n` answers to a prompt."""

    def seed(number: int) -> int | None:
        return None if params.seed is None else (params.seed + number) % 2**32

    return [replace(params, n=1, seed=seed(number)) for number in range(params.n)]


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
