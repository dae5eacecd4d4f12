"""Outputs held to a form, in OpenAI's words and in vLLM's, by the official client where it has them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dflash_trt.runtime.llm import LLM
from tests.serving.running_server import MESSAGES, RunningServer

PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["mill", "market"]},
        "open": {"type": "boolean"},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 3},
    },
    "required": ["name", "kind", "open", "days"],
    "additionalProperties": False,
}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_tokens": 300}


def as_response_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": schema}}


def require_place(text: str) -> None:
    """A text that matches `PLACE`."""
    place = json.loads(text)
    assert place.keys() == {"name", "kind", "open", "days"}
    assert isinstance(place["name"], str) and len(place["name"]) <= 12
    assert place["kind"] in ("mill", "market") and isinstance(place["open"], bool)
    assert len(place["days"]) <= 3 and all(day in range(1, 8) for day in place["days"])


@pytest.mark.parametrize("window", [None, 1, 8])
def test_json_of_a_schema(server: RunningServer, window: int | None) -> None:
    form: Any = as_response_format(PLACE)
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, **SAMPLED, "response_format": form}
    body["extra_body"] = {"verify_window": window}
    choice = server.openai.chat.completions.create(**body).choices[0]
    assert choice.finish_reason == "stop" and choice.message.content
    require_place(choice.message.content)
    chunks = server.openai.chat.completions.create(**body, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_any_json_object(server: RunningServer, alone: LLM) -> None:
    """An inclination to closing braces makes it a short one."""
    closing = {str(token): 30 for text, token in alone.tokenizer.get_vocab().items() if text == "}"}
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "logit_bias": closing}
    answer = server.openai.chat.completions.create(**body, response_format={"type": "json_object"})
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-f]{3,5}!"}, "[a-f]{3,5}!"),
        ({"choice": ["the mill", "the market"]}, "the (mill|market)"),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
        ({"json": {"enum": ["a", "b"]}}, '"[ab]"'),
        ({"json": '{"enum": ["a", "b"]}'}, '"[ab]"'),
    ],
    ids=str,
)
def test_vllms_forms(server: RunningServer, form: dict[str, Any], pattern: str) -> None:
    params = {**SAMPLED, "structured_outputs": form}
    for body, path in (({"messages": MESSAGES}, "chat/completions"), ({"prompt": "Saturday"}, "completions")):
        answer = server.post(f"/v1/{path}", **body, **params).json()
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert re.fullmatch(pattern, text), text
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": as_response_format({"type": "objectt"})}, "response_format.json_schema.schema.type"),
        (
            {"response_format": as_response_format({"type": "string", "pattern": "("})},
            "response_format.json_schema.schema.pattern",
        ),
        (
            {"response_format": as_response_format({"properties": {"a": {"uniqueItems": True}}})},
            "response_format.json_schema.schema.properties.a.uniqueItems",
        ),
        ({"structured_outputs": {"json": {"items": {"not": {}}}}}, "structured_outputs.json.items.not"),
        ({"structured_outputs": {"regex": "a(?=b)b"}}, "structured_outputs.regex"),
        ({"response_format": as_response_format(7)}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= root"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ],
    ids=str,
)
def test_what_is_no_form_is_refused_by_its_field(server: RunningServer, change: dict[str, Any], param: str) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [("chat/completions", {"messages": MESSAGES})]
    if "response_format" not in change:
        bodies.append(("completions", {"prompt": "Saturday"}))
    for path, body in bodies:
        response = server.post(f"/v1/{path}", **body, max_tokens=8, **change)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert "\n" not in error["message"]
