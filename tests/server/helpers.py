"""A server on a real socket, and how the tests ask it."""

import socket
import threading
from typing import Any

import uvicorn
from openai import OpenAI

from jaxinfer.engine import LLM
from server.app import create_app

MODEL = "tiny_qwen"
CAPITAL = [{"role": "user", "content": "What is the capital of Norway?"}]
QUICK = {"chat_template_kwargs": {"enable_thinking": False}}
"""What makes the model answer without thinking."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}


class Server:
    """uvicorn on a thread of its own."""

    def __init__(self, llm: LLM | None = None, **options: Any) -> None:
        self.llm = llm
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        app = create_app(llm, **options)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def ask(client: OpenAI, messages: Any = CAPITAL, **options: Any) -> Any:
    fields = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 100}
    return client.chat.completions.create(**(fields | options))


def text(chunks: list[Any], field: str) -> str:
    deltas = (chunk.choices[0].delta for chunk in chunks if chunk.choices)
    return "".join(getattr(delta, field, None) or "" for delta in deltas)
