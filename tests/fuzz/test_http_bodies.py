"""Spoilt JSON, random bytes and headers into every route of the HTTP door: an answer, or an error in OpenAI's shape."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.answering import Running
from tests.support.fuzzing import refuse_leaks, spoilt

REFUSED = {400, 404, 405, 413, 415}

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "a"},
    {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []},
]
FIELDS: dict[str, Any] = {
    "model": "tiny",
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "seed": -1,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [1, 2],
    "max_tokens": 5,
    "min_tokens": 1,
    "stop": ["z"],
    "stop_token_ids": [4],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "cache_salt": "pepper",
    "bad_words": ["a"],
    "user": "somebody",
    "metadata": {"a": "b"},
    "response_format": {"type": "text"},
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "hello"},
        {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": [1, 2, 3], "logprobs": 2, "best_of": 1},
        {"prompt": [[1], [2]], **FIELDS},
    ],
    "/v1/chat/completions": [
        {"messages": MESSAGES[1:2]},
        {"messages": MESSAGES, "stream": True, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3},
        {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": True}, **FIELDS},
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
    ],
    "/tokenize": [
        {"prompt": "hello", "return_token_strs": True},
        {"messages": MESSAGES},
        {"prompt": "x", "model": "alias"},
    ],
    "/detokenize": [{"tokens": [1, 2, 299]}],
}

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 1.5, -0.0, 2**31, 2**32, 2**63, -(2**63), 2**64, 10**400, 1e308, 1e-320),
    *(float("nan"), float("inf"), "", "x", "1", "\0", "\ud800", "é" * 300, "<|end|>", "9" * 400, "text", "required"),
    *([], {}, [[]], [None], [1, "a"], {"a": {}}, {"type": "text"}, [{}], [[[[[[]]]]]], [0] * 500, ["x"] * 200),
]
"""What takes the place of parts of bodies."""


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all parts of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in _places(inner, (*path, key)))]


@st.composite
def changed(draw: Any, bodies: list[dict[str, Any]]) -> bytes:
    """Draw a body with some of its parts replaced, removed, doubled or renamed."""
    body: Any = copy.deepcopy(draw(st.sampled_from(bodies)))
    for _ in range(draw(st.integers(1, 3))):
        places = _places(body)[1:]
        if not places:
            break
        *way, key = draw(st.sampled_from(places))
        parent = body
        for step in way:
            parent = parent[step]
        match draw(st.sampled_from(["replace", "replace", "remove", "move", "wrap", "repeat"])):
            case "remove":
                del parent[key]
            case "move" if isinstance(parent, dict):
                parent[draw(st.sampled_from(["foo", "stream", "n", "prompt", "messages", "content", "\ud800"]))] = (
                    parent[key]
                )
            case "wrap":
                parent[key] = [parent[key]]
            case "repeat" if isinstance(parent, list):
                parent *= draw(st.sampled_from([2, 100]))
            case _:
                parent[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return json.dumps(body).encode()


async def post(running: Running, path: str, body: bytes, headers: dict[str, str] | None = None) -> int:
    """Make a call and see that it ends well, or badly in good order; return its status."""
    headers = {"content-type": "application/json"} | (headers or {})
    response = await running.doors.http.post(path, content=body, headers=headers)
    text = response.text
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            events = text.split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            assert all("choices" in json.loads(event.removeprefix("data: ")) for event in events[:-2])
        else:
            assert response.json()
        return 200
    assert response.status_code in REFUSED, (response.status_code, text, body)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(text) < 4000
    refuse_leaks(text)
    return response.status_code


@pytest.mark.parametrize("path", BODIES)
@settings(settings.get_profile("fuzz"))
@given(data=st.data())
def test_changed_bodies(running: Running, path: str, data: st.DataObject) -> None:
    running.do(post(running, path, data.draw(changed(BODIES[path]))))


@pytest.mark.parametrize("path", BODIES)
@settings(settings.get_profile("fuzz"))
@given(data=st.data())
def test_spoilt_bodies(running: Running, path: str, data: st.DataObject) -> None:
    running.do(post(running, path, data.draw(spoilt([json.dumps(body).encode() for body in BODIES[path]]))))


@pytest.mark.parametrize("path", BODIES)
@settings(settings.get_profile("fuzz"))
@given(body=st.one_of(st.binary(max_size=200), st.text(st.sampled_from('[]{}",:1e+-.\\u0')).map(str.encode)))
def test_random_bodies(running: Running, path: str, body: bytes) -> None:
    running.do(post(running, path, body))


@pytest.mark.parametrize("path", BODIES)
def test_whole_bodies(running: Running, path: str) -> None:
    """What is changed above means something to begin with."""
    assert running.do(post(running, path, json.dumps(BODIES[path][0]).encode())) == 200
    for body in BODIES[path]:
        running.do(post(running, path, json.dumps(body).encode()))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"user": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"prompt": [' + b"[]," * 300_000 + b"[1]]}",
        b'{"messages": [' + b'{"role": "u", "content": "x"},' * 50_000 + b"{}]}",
        b'{"prompt": "' + b"x" * 5_000_000 + b'"}',
        b'{"prompt": "' + b"\\" * 1_000_001 + b'"}',
        b'{"prompt": ' + b"9" * 1_000_000 + b"}",
        b'{"tokens": [' + b"1," * 100_000 + b"1]}",
        b'{"stop": ["' + b"x" * 1_000_000 + b'"], "prompt": "x"}',
        b'{"prompt": "x", "' + b"k" * 1_000_000 + b'": 1}',
        b'{"prompt": "x", "prompt": "y", "n": 1, "n": 2}',
    ],
    ids=lambda body: f"{body[:20]!r}",
)
def test_extreme_bodies(running: Running, path: str, body: bytes) -> None:
    running.do(post(running, path, body))


@settings(settings.get_profile("fuzz"))
@given(
    name=st.sampled_from(
        ["content-type", "content-encoding", "authorization", "x-request-id", "traceparent", "expect", "accept", "host"]
    ),
    value=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=300),
)
def test_headers(running: Running, name: str, value: str) -> None:
    if name == "expect":
        value = "100-continue"
    running.do(post(running, "/tokenize", b'{"prompt": "x"}', {name: value.strip()}))


@settings(settings.get_profile("fuzz"))
@given(
    path=st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=40),
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"]),
)
def test_paths(running: Running, path: str, method: str) -> None:
    async def ask() -> None:
        response = await running.doors.http.request(method, f"/v1/models/{path}".encode("utf-8", "replace").decode())
        assert response.status_code in {200} | REFUSED
        if method != "HEAD":
            refuse_leaks(response.text.replace(path, ""))

    running.do(ask())
