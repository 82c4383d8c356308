"""A teacher's server over real sockets that scores as vLLM does, and goes wrong as its script says."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from opd.heads import Head, split_model
from opd.ranks import free_port

SCORING = ("/pooling", "/v1/completions")


@dataclass(frozen=True)
class Answer:
    """What goes over the wire."""

    body: bytes
    metadata: Mapping[str, Any] | None = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False  # the body breaks off in the middle
    drip: float = 0.0  # seconds between its bytes

    @property
    def json(self) -> Any:
        """The body as what it says."""
        return json.loads(self.body)


Fault = Callable[[Answer], Answer | None]  # None: no answer, ever


def hang(_: Answer) -> None:
    """Accepts, and never answers."""


def status(code: int, **headers: str) -> Fault:
    """An error answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: Answer(json.dumps({"error": f"stub {code}"}).encode(), None, code, named)


def cut(answer: Answer) -> Answer:
    """Breaks off in mid-body."""
    return replace(answer, cut=True)


def garbled(answer: Answer) -> Answer:
    """Says that the body is compressed, which it is not."""
    return replace(answer, headers={**answer.headers, "content-encoding": "gzip"})


def drip(seconds: float) -> Fault:
    """Sends one byte at a time."""
    return lambda answer: replace(answer, drip=seconds)


def edited(change: Callable[[Any], Any]) -> Fault:
    """Changes the JSON: of the body, or of the header that describes a binary one."""

    def edit(answer: Answer) -> Answer:
        if answer.metadata is not None:
            return replace(answer, metadata=change(json.loads(json.dumps(answer.metadata))))
        return replace(answer, body=json.dumps(change(answer.json)).encode())

    return edit


def without_row(index: int) -> Fault:
    """One row is not in the answer."""

    def change(answer: Any) -> Any:
        key = "data" if "data" in answer else "choices"
        return {**answer, key: [row for row in answer[key] if row["index"] != index]}

    return edited(change)


def raw(body: bytes) -> Fault:
    """Another body altogether."""
    return lambda answer: replace(answer, body=body)


@dataclass
class Request:
    """What a client asked."""

    path: str
    body: Any
    at: float
    authorization: str | None

    @property
    def rows(self) -> list[list[int]]:
        """The token ids of a scoring request."""
        return self.body["input" if self.path == "/pooling" else "prompt"]


@functools.cache
def loaded(folder: Path) -> tuple[tuple[nn.Module, Head], PreTrainedTokenizerBase]:
    """Body and head of a model, and its tokenizer; read once."""
    return split_model(AutoModelForCausalLM.from_pretrained(folder).eval()), AutoTokenizer.from_pretrained(folder)


class TeacherStub:
    """`folder`: the model. `script`: faults of the next scoring requests, one each; afterwards all is well.

    `dies_at`: the number of the scoring request at which the server goes away for good.
    """

    def __init__(
        self, folder: Path, script: Sequence[Fault | None] = (), *, port: int = 0, max_logprobs: int = 20,
        dies_at: int | None = None, key: str = "", max_len: int = 512, name: str | None = None,
    ) -> None:  # fmt: skip
        (self.body, self.head), self.tokenizer = loaded(folder)
        self.name, self.script, self.port = name or str(folder), list(script), port or free_port()
        self.max_logprobs, self.dies_at, self.key, self.max_len = max_logprobs, dies_at, key, max_len
        self.asked: list[Request] = []
        self.lock, self.over, self.server = threading.Lock(), threading.Event(), None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def scored(self) -> list[Request]:
        """The scoring requests so far."""
        return [request for request in self.asked if request.path in SCORING]

    @contextmanager
    def running(self) -> Iterator[TeacherStub]:
        """The server inside the block."""
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def start(self) -> None:
        """Listens; may be called again after `stop`."""
        self.over.clear()
        stub = self

        class Handler(_Handler):
            owner = stub

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Nobody listens any more; what hangs is let go."""
        self.over.set()
        server, self.server = self.server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def dies_of(self, request: Request) -> bool:
        """Notes the request; whether it is the one that the server does not survive."""
        with self.lock:
            dies = self.dies_at is not None and request.path in SCORING and len(self.scored) >= self.dies_at
            self.asked.append(request)
        if dies:
            threading.Thread(target=self.stop, daemon=True).start()
        return dies

    def answer(self, request: Request) -> Answer | None:
        """What a healthy server says, through the next fault of the script."""
        if self.key and request.authorization != f"Bearer {self.key}":
            return Answer(b'{"error": "missing or wrong key"}', status=401)
        if request.path == "/v1/models":
            card = {"id": self.name, "root": self.name, "max_model_len": self.max_len}
            return Answer(json.dumps({"object": "list", "data": [card]}).encode())
        if request.path == "/tokenize":
            made = self.tokenizer(request.body["prompt"], add_special_tokens=False)["input_ids"]
            return Answer(json.dumps({"count": len(made), "tokens": made}).encode())
        if request.path not in SCORING:
            return Answer(b'{"detail": "Not Found"}', status=404)
        with self.lock:
            fault = self.script.pop(0) if self.script else None
        healthy = self._pooling(request.body) if request.path == "/pooling" else self._completions(request.body)
        return healthy if fault is None else fault(healthy)

    @torch.no_grad()
    def hidden(self, ids: list[int]) -> torch.Tensor:
        """Last hidden states [T, H] of one sequence, by itself."""
        return self.body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    def _pooling(self, body: Mapping[str, Any]) -> Answer:
        rows, content = [], b""
        for index, ids in enumerate(body["input"]):
            states = self.hidden(ids).to(getattr(torch, body["embed_dtype"]))
            data = states.contiguous().view(torch.uint8).numpy().tobytes()
            rows.append(
                {
                    "index": index, "embed_dtype": body["embed_dtype"], "endianness": "little",
                    "start": len(content), "end": len(content) + len(data), "shape": list(states.shape),
                }
            )  # fmt: skip
            content += data
        return Answer(content, {"id": "pooling-1", "model": self.name, "data": rows, "usage": {}})

    @torch.no_grad()
    def _completions(self, body: Mapping[str, Any]) -> Answer:
        k = body["prompt_logprobs"]
        if k > self.max_logprobs:
            said = f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}"
            return Answer(json.dumps({"error": {"message": said}}).encode(), status=400)
        choices = []
        for index, ids in enumerate(body["prompt"]):
            logp = torch.log_softmax(self.head.logits(self.hidden(ids)), -1)
            entries: list[Any] = [None]
            for token, row in zip(ids[1:], logp[:-1], strict=True):
                top = row.topk(k).indices.tolist()
                entries.append(
                    {str(i): {"logprob": row[i].item(), "decoded_token": ""} for i in dict.fromkeys([token, *top])}
                )
            choices.append({"index": index, "text": "", "prompt_logprobs": entries})
        return Answer(json.dumps({"choices": choices}).encode())


class _Handler(BaseHTTPRequestHandler):
    """One connection; `protocol_version` lets it stay open, as uvicorn does."""

    owner: TeacherStub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: Any) -> None:
        stub = self.owner
        request = Request(self.path, body, time.monotonic(), self.headers.get("authorization"))
        answer = None if stub.over.is_set() or stub.dies_of(request) else stub.answer(request)
        if answer is None:
            self.close_connection = True
            if not stub.over.is_set() and stub.dies_at is None:
                stub.over.wait()
            return
        self.send_response(answer.status)
        if answer.metadata is not None:
            self.send_header("metadata", json.dumps(answer.metadata))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        if answer.cut:
            self.wfile.write(answer.body[: len(answer.body) // 2])
            self.close_connection = True
        elif answer.drip:
            self._drip(answer)
        else:
            self.wfile.write(answer.body)

    def _drip(self, answer: Answer) -> None:
        for byte in answer.body:
            if self.owner.over.wait(answer.drip):
                return
            try:
                self.wfile.write(bytes([byte]))
            except OSError:  # the client has had enough
                return

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""
