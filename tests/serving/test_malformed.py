"""Ten thousand requests that are wrong, made from our own OpenAPI document: each is refused, none does harm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dflash_trt.serving.app import create_app
from dflash_trt.serving.settings import ServerSettings
from tests.conftest import TINY, build_pair
from tests.serving.malformed_bodies import TEXTS, Bodies

FIELDS, TOKENS, ENVELOPES, SCHEMATHESIS = 7_700, 1_000, 1_000, 300
assert FIELDS + TOKENS + ENVELOPES + SCHEMATHESIS == 10_000

KINDS = {
    "/v1/completions": ("CompletionRequest", 2_800),
    "/v1/chat/completions": ("ChatRequest", 3_500),
    "/tokenize": ("TokenizeRequest", 1_000),
    "/detokenize": ("DetokenizeRequest", 400),
}
"""Of each endpoint: the schema of its bodies, and how many of these are sent that have a wrong field."""
assert sum(count for _, count in KINDS.values()) == FIELDS

T = TypeVar("T")


class InProcess:
    """The application on an event loop that runs while a request is answered."""

    def __init__(self, app: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._lifespan = app.router.lifespan_context(app)
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test"
        )
        self.engine = app.state.service.engine
        self.document = app.openapi()
        self.run(self._lifespan.__aenter__())

    def run(self, work: Awaitable[T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, 60))

    def send(self, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> httpx.Response:
        url = httpx.URL("http://test").copy_with(raw_path=quote(path, errors="surrogatepass").encode())
        request = httpx.Request(method, url, headers=headers, content=body)
        return self.run(self._client.send(request))

    def post(self, path: str, body: bytes) -> httpx.Response:
        return self.send("POST", path, body, [(b"content-type", b"application/json")])

    def close(self) -> None:
        self.run(self._client.aclose())
        self.run(self._lifespan.__aexit__(None, None, None))
        self._loop.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """With short sequences: a request that happens to be right costs little."""
    directory = tmp_path_factory.mktemp("short") / "engine"
    llm = build_pair(directory, TINY / "target", TINY / "drafter", max_seq_len=64, max_num_tokens=64)
    server = InProcess(create_app(llm, ServerSettings(model_name="tiny")))
    yield server
    server.close()


@pytest.fixture(autouse=True)
def unharmed(server: InProcess) -> Iterator[None]:
    """The server still answers afterwards, as before, and holds nothing."""
    before = _answer(server)
    yield
    assert _answer(server) == before
    assert server.engine.open_requests == 0 and not server.engine._answers
    snapshot = server.run(server.engine.snapshot())
    assert (snapshot.running, snapshot.waiting, snapshot.cached_tokens) == (0, 0, 0)


def _answer(server: InProcess) -> str:
    body = {"prompt": "On Saturday", "max_tokens": 20, "temperature": 0}
    response = server.post("/v1/completions", json.dumps(body).encode())
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def send_many(count: int, strategy: st.SearchStrategy[T], send: Callable[[T], None]) -> None:
    """Send what so many examples make, the same every time."""
    sent = 0

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: T) -> None:
        nonlocal sent
        sent += 1
        send(example)

    run()
    assert sent >= count


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert 400 <= response.status_code < 500, (response.status_code, response.text)
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and len(error["message"].splitlines()) == 1
    assert isinstance(error["type"], str) and error["type"].endswith("_error")
    return error


@pytest.mark.parametrize("path", KINDS)
def test_a_wrong_field_is_named(server: InProcess, path: str) -> None:
    """One thing is wrong: a type, a number, or a field that is missing."""
    name, count = KINDS[path]

    def send(example: tuple[Any, str]) -> None:
        body, field = example
        response = server.post(path, json.dumps(body).encode())
        assert response.status_code == 400
        param = refusal(response)["param"]
        inside = param is not None and param.startswith((f"{field}.", f"{field}["))
        assert param == field or inside, (param, field, body)

    send_many(count, Bodies(server.document, name).wrong(), send)


TOKENS_THAT_ARE_NONE = [b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\n"', b"01"]
TOKENS_THAT_ARE_NONE += [b"'a'", b"", b"}", b"[1,]", b"9" * 5_000, b"-", b"tru", b'"\\x"', b'"', b"[" * 500, b"\x00"]


def test_what_is_not_json(server: InProcess) -> None:
    """Somewhere in a body that is right is what is no JSON or no number, or the body ends before its end."""
    bodies = {path: Bodies(server.document, name) for path, (name, _) in KINDS.items()}
    places = st.sampled_from([(path, place) for path in bodies for place in bodies[path].places])
    cuts = st.sampled_from([None, 0.3, 0.6, 0.9])

    def send(example: tuple[Any, bytes, float | None]) -> None:
        (path, place), token, cut = example
        text = json.dumps(place.put("WHERE")).encode().replace(b'"WHERE"', token)
        response = server.post(path, text if cut is None else text[: int(len(text) * cut)])
        # A field may hold anything, or several numbers end in an infinity that it may hold.
        if response.status_code != 200:
            refusal(response)

    send_many(TOKENS, st.tuples(places, st.sampled_from(TOKENS_THAT_ARE_NONE), cuts), send)


HEADERS = [b"content-type", b"content-length", b"accept", b"authorization", b"expect", b"transfer-encoding", b"host"]
VALUES = [b"", b"application/json", b"application/json; charset=utf-16", b"text/plain", b"a" * 5_000, b"\xff\xfe"]
VALUES += [b"-1", b"9" * 40, b"Bearer \xe9", b"application/x-www-form-urlencoded", b"multipart/form-data", b"\xc2\xb2"]


def test_odd_requests(server: InProcess) -> None:
    """Methods, paths, headers and bodies that do not go together."""
    known = st.sampled_from([*server.document["paths"], "/", "/v1", "/v1/models/\ud7ff", "//", "/v1/completions/"])
    envelopes = st.tuples(
        st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW"]),
        known | TEXTS.map(lambda text: "/" + text),
        st.sampled_from([b"", b"null", b'"a"', b"[]", b"{}", b'{"prompt": "a"}', b"\xff"]) | st.binary(max_size=20),
        st.lists(st.tuples(st.sampled_from(HEADERS), st.sampled_from(VALUES)), max_size=3),
    )

    def send(example: tuple[str, str, bytes, list[tuple[bytes, bytes]]]) -> None:
        response = server.send(*example)
        if response.status_code >= 400 and example[0] != "HEAD":
            refusal(response)
        assert response.status_code < 500

    send_many(ENVELOPES, envelopes, send)


def test_what_schemathesis_finds_wrong(server: InProcess) -> None:
    """Many things are wrong together."""
    schema = schemathesis.openapi.from_dict(server.document)
    negative = schemathesis.GenerationMode.NEGATIVE
    cases = [schema[path]["POST"].as_strategy(generation_mode=negative) for path in KINDS]

    def send(case: Any) -> None:
        body = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
        response = server.post(case.path, body)
        if response.status_code != 200:
            refusal(response)

    send_many(SCHEMATHESIS, st.one_of(cases), send)
