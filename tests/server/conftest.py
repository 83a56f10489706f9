from collections.abc import Iterator

import pytest
from openai import OpenAI

from jaxinfer.engine import LLM
from tests.server.helpers import Server


@pytest.fixture(scope="module")
def server(tiny_llm: LLM) -> Iterator[Server]:
    running = Server(tiny_llm)
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
