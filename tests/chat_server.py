"""A chat API on a real socket, as good or as bad as a test wants it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opd.chat import ApiConfig
from opd.ledger import Account
from opd.remote import RemoteConfig


def completion(
    text: str | None, finish: str = "stop", prompt_tokens: int = 10, completion_tokens: int = 5, **message: Any
) -> dict[str, Any]:
    """The JSON of a chat completion."""
    return {
        "choices": [{"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens},
    }


@dataclass(frozen=True)
class Fault:
    """What a server does instead of answering."""

    status: int = 0  # an error status
    headers: dict[str, str] = field(default_factory=dict)
    text: str = "out of order"
    breaks_off: bool = False  # announces more than it sends
    silent: bool = False  # accepts, and never answers


Script = Callable[[dict[str, Any], int], "dict[str, Any] | Fault"]  # (request body, its number from 0) -> what comes


@dataclass
class ChatServer:
    """`script` answers; `bodies` and `keys` are what was asked, in the order of arrival."""

    script: Script
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)  # ends the silence of silent faults

    @property
    def texts(self) -> list[str]:
        """The last message of every request."""
        return [body["messages"][-1]["content"] for body in self.bodies]


@contextmanager
def chat_server(script: Script) -> Iterator[ChatServer]:
    """A server on a free port of the loopback interface, while the block runs."""
    served = ChatServer(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/chat/completions", self.path
            with served.lock:
                number = len(served.bodies)
                served.bodies.append(body)
                served.keys.append(self.headers.get("authorization"))
            answer = served.script(body, number)
            if isinstance(answer, Fault) and answer.silent:
                served.released.wait(60)
                self.close_connection = True
                return
            status = answer.status or 200 if isinstance(answer, Fault) else 200
            content = answer.text.encode() if isinstance(answer, Fault) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in (answer.headers if isinstance(answer, Fault) else {}).items():
                self.send_header(name, value)
            short = isinstance(answer, Fault) and answer.breaks_off
            self.send_header("content-length", str(len(content) + 100 * short))
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = short

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        served.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def api(
    url: str,
    folder: object,
    *,
    remote: dict[str, Any] | None = None,
    account: dict[str, Any] | None = None,
    **settings: Any,
) -> ApiConfig:
    """How tests ask a server: short limits, an account in `folder`."""
    reach = RemoteConfig([url], "OPD_TEST_KEY", **{"timeout": 5.0, "give_up_after": 5.0, **(remote or {})})
    return ApiConfig(reach, Account(str(folder), **(account or {})), **{"max_tokens": 20, **settings})
