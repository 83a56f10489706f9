"""Many callers on one engine, whose thread none of them may bring down."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxinfer import LLM, AsyncLLM, Completion, RequestError, SamplingParams
from jaxinfer.engine import Chunk

GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=True, ignore_eos=True)
ENDLESS = replace(GREEDY, max_tokens=None)


@pytest.fixture
def served(tiny_llm: LLM) -> Iterator[AsyncLLM]:
    served = AsyncLLM(tiny_llm)
    served.start()
    yield served
    served.close()


def in_time[T](work: Coroutine[Any, Any, T]) -> T:
    """Run it; hanging is the failure that these tests are most about."""

    async def bounded() -> T:
        async with asyncio.timeout(120):
            return await work

    return asyncio.run(bounded())


async def complete(stream: AsyncIterator[Chunk]) -> Completion:
    return Completion.join([chunk async for chunk in stream])


def test_concurrent_streams_give_what_each_gives_alone(served: AsyncLLM, code: list[int]) -> None:
    jobs = [(code[: 5 + 3 * n], replace(GREEDY, max_tokens=4 + 3 * n)) for n in range(5)]

    async def alone() -> list[Completion]:
        return [await complete(served.stream(*job)) for job in jobs]

    async def together() -> list[Completion]:
        return await asyncio.gather(*(complete(served.stream(*job)) for job in jobs))

    for one, other in zip(in_time(alone()), in_time(together()), strict=True):
        assert (one.token_ids, one.logprobs, one.text) == (
            other.token_ids,
            other.logprobs,
            other.text,
        )


def test_closing_a_stream_cancels_its_request(
    served: AsyncLLM, tiny_llm: LLM, code: list[int]
) -> None:
    async def work() -> None:
        stream = served.stream(code[:9], ENDLESS)
        await anext(stream)
        await stream.aclose()
        # The engine's thread takes orders in turn: after this one it has taken the other.
        await complete(served.stream(code[:9], GREEDY))

    in_time(work())
    served.close()
    assert not tiny_llm.engine.busy


def test_cancelling_the_task_cancels_its_request(
    served: AsyncLLM, tiny_llm: LLM, code: list[int]
) -> None:
    async def work() -> None:
        task = asyncio.create_task(complete(served.stream(code[:9], ENDLESS)))
        await complete(served.stream(code[:9], GREEDY))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await complete(served.stream(code[:9], GREEDY))

    in_time(work())
    served.close()
    assert not tiny_llm.engine.busy


@pytest.mark.parametrize(
    ("prompt", "error"), [([], RequestError), ([4096], RequestError), (["a"], TypeError)]
)
def test_an_impossible_prompt_is_its_callers_problem_alone(
    served: AsyncLLM, code: list[int], prompt: list[Any], error: type[Exception]
) -> None:
    async def work() -> Completion:
        good = asyncio.create_task(complete(served.stream(code[:9], GREEDY)))
        with pytest.raises(error):
            await complete(served.stream(prompt, GREEDY))
        return await good

    assert in_time(work()).usage.completion_tokens == 16


def test_shutting_down_ends_open_streams_with_an_error(
    served: AsyncLLM, tiny_llm: LLM, code: list[int]
) -> None:
    async def work() -> None:
        streams = [served.stream(code[: 9 + n], ENDLESS) for n in range(6)]
        await anext(streams[0])
        pending = [asyncio.create_task(complete(stream)) for stream in streams]
        await asyncio.sleep(0)
        served.close()
        for task in pending:
            with pytest.raises(RuntimeError, match="the engine was shut down"):
                await task

    in_time(work())
    assert not tiny_llm.engine.busy


def test_an_engine_that_is_not_running_says_so(tiny_llm: LLM, code: list[int]) -> None:
    served = AsyncLLM(tiny_llm)
    with pytest.raises(RuntimeError, match="the engine is not running: call start"):
        in_time(complete(served.stream(code[:9], GREEDY)))


def test_it_can_be_started_again(served: AsyncLLM, code: list[int]) -> None:
    first = in_time(complete(served.stream(code[:9], GREEDY)))
    served.close()
    served.start()
    assert in_time(complete(served.stream(code[:9], GREEDY))) == first


def test_a_failing_step_ends_the_streams_but_not_the_engine(
    served: AsyncLLM, tiny_llm: LLM, code: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> Completion:
        stream = served.stream(code[:9], ENDLESS)
        await anext(stream)
        with monkeypatch.context() as patch:
            patch.setattr(tiny_llm.engine, "_decode", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await complete(stream)
        return await complete(served.stream(code[:9], GREEDY))

    assert in_time(work()).usage.completion_tokens == 16


def test_a_caller_that_is_gone_does_not_take_the_engine_with_it(
    served: AsyncLLM, tiny_llm: LLM, code: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, gone = tiny_llm.engine.step, threading.Event()
    leaving = threading.Event()

    def late() -> Any:
        given = step()
        if leaving.is_set():
            gone.wait()
        return given

    monkeypatch.setattr(tiny_llm.engine, "step", late)

    async def leave() -> None:
        stream = served.stream(code[:9], ENDLESS)
        await anext(stream)
        leaving.set()

    in_time(leave())
    gone.set()
    assert in_time(complete(served.stream(code[:9], GREEDY))).usage.completion_tokens == 16
