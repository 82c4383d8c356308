"""`opd serve-teacher`: the command line that it becomes, what it refuses, and the key that it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from opd.exits import REFUSED
from opd.serve import RequireKey, ServeConfig, server_command
from tests.runs import opd

KEY = "open sesame"


def flag(command: list[str], name: str) -> str:
    """The value after a flag."""
    return command[command.index(name) + 1]


def test_a_server_of_hidden_states_gives_them_whole_and_listens_to_this_machine_only() -> None:
    command = server_command(ServeConfig("some/teacher", port=9000, dtype="float32", max_len=128))
    assert (flag(command, "--model"), flag(command, "--port"), flag(command, "--host")) == (
        "some/teacher", "9000", "127.0.0.1",
    )  # fmt: skip
    assert (flag(command, "--runner"), flag(command, "--convert")) == ("pooling", "embed")
    assert flag(command, "--pooler-config") == '{"task": "token_embed", "use_activation": false}'
    assert (flag(command, "--dtype"), flag(command, "--max-model-len")) == ("float32", "128")
    assert flag(command, "--middleware") == "opd.serve.RequireKey"
    assert "--api-key" not in command  # a command line can be read by everyone on the machine


def test_a_server_of_log_probabilities_gives_those_of_the_model_itself() -> None:
    command = server_command(ServeConfig("t", gives="logprobs", max_logprobs=64, args=["--seed", "3"]))
    assert (flag(command, "--max-logprobs"), flag(command, "--logprobs-mode")) == ("64", "raw_logprobs")
    assert command[-2:] == ["--seed", "3"]
    assert "--runner" not in command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["port=9000"], "model: missing"),
        (["model=m", "prot=9000"], "did you mean port"),
        (["model=m", "gives=logits"], "gives: "),
        (["model=m", "port=0"], "port=0: must lie in 1 to 65535"),
        (["model=m", "host=0.0.0.0"], "anyone who reaches this address could use the teacher"),
        (["model=[m"], "usage: opd serve-teacher"),
    ],
)
def test_mistakes_are_refused_with_the_usage(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_API_KEY", " \n")
    ended = opd("serve-teacher", *arguments)
    assert ended.code == REFUSED
    assert ended.err.startswith("opd: refused\n") and said in ended.err
    assert "usage: opd serve-teacher model=..." in ended.err


def test_other_machines_may_be_served_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_API_KEY", KEY)
    assert flag(server_command(ServeConfig("m", host="0.0.0.0")), "--host") == "0.0.0.0"


def answered(kind: str, path: str, *given: bytes) -> list[Any]:
    """What the guard and the application behind it send for one request with these Authorization headers."""
    sent: list[Any] = []

    async def application(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "inside"})

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {}

    scope = {"type": kind, "path": path, "headers": [(b"authorization", value) for value in given]}
    asyncio.run(RequireKey(application)(scope, receive, send))
    return sent


RIGHT = b"Bearer " + KEY.encode()
WRONG = [
    (),
    (b"",),
    (b"Bearer ",),
    (KEY.encode(),),
    (RIGHT + b"!",),
    (RIGHT[:-1],),
    (b"Basic " + KEY.encode(),),
    (b"\xff",),
]


@pytest.mark.parametrize("stored", [KEY, KEY + "\n"])
@pytest.mark.parametrize(
    "path", ["/pooling", "/v1/models", "/v1/completions", "/tokenize", "/metrics", "/health/x", "/"]
)
def test_every_path_needs_the_key(path: str, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_API_KEY", stored)
    assert answered("http", path, RIGHT) == [{"type": "inside"}]
    assert answered("websocket", path, RIGHT) == [{"type": "inside"}]
    for given in WRONG:
        assert answered("http", path, *given)[0]["status"] == 401
        assert answered("websocket", path, *given) == [{"type": "websocket.close", "code": 1008}]


def test_health_and_the_servers_own_start_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_API_KEY", KEY)
    assert answered("http", "/health") == [{"type": "inside"}]
    assert answered("lifespan", "") == [{"type": "inside"}]


def test_without_a_key_in_the_environment_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPD_API_KEY", raising=False)
    assert answered("http", "/pooling") == [{"type": "inside"}]


@pytest.mark.parametrize("flag", ["--host", "--port", "--model", "--middleware", "--api-key"])
@pytest.mark.parametrize("form", ["{flag}=0.0.0.0", "{flag}"])
def test_further_flags_cannot_undo_what_is_guarded(flag: str, form: str) -> None:
    with pytest.raises(ValueError, match=f"args: {flag} is decided by"):
        ServeConfig("t", args=[form.format(flag=flag), "0.0.0.0"])
