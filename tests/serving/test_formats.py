"""Answers divided into reasoning, content and calls, whole and in pieces cut anywhere."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.serving.formats import AnswerParser, ParsedAnswer, formats_of
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.reasoning import ReasoningParser, thinking_after
from dflash_trt.serving.tool_calls import HERMES, LLAMA, PARSERS, ToolCallDelta, ToolFormat
from dflash_trt.serving.tools import read_tool_use
from tests.serving.templates import LLAMA3, QWEN3

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"</tool_call>"}}\n</tool_call>'
FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "\n", " ", ";", "{", "}", "[", '"', "\\"),
    *('{"name": "f", "arguments": {"x": [1, "}"]}}', '{"parameters": {}, "name": "g"}', '{"type": "function", '),
    *('"name": "h", ', '"arguments": {"y": "\\u00e9 {"}', '"parameters": {"z": NaN}', "text", "é", "<", "<tool", CALL),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


NAMES = ("f", "g", "h")


def parser(
    tools: ToolFormat | None,
    names: Collection[str] = NAMES,
    *,
    thinks: bool = True,
    required: bool = False,
    valid: bool = False,
) -> AnswerParser:
    calls = None if tools is None else PARSERS[tools](names, required=required, valid=valid)
    return AnswerParser(ReasoningParser("possible" if thinks else "none"), calls)


def parse(parser: AnswerParser, *pieces: str, cut: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and names and arguments of calls."""
    answer = ParsedAnswer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish(cut=cut))
    assert parser.called == bool(answer.tool_calls)
    assert len({call["id"] for call in answer.tool_calls}) == len(answer.tool_calls)
    functions = [call["function"] for call in answer.tool_calls]
    return answer.reasoning, answer.content, [(function["name"], function["arguments"]) for function in functions]


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("tools", [None, HERMES, LLAMA])
@given(pieces=cut_texts())
def test_pieces_change_nothing(tools: ToolFormat | None, cut: bool, valid: bool, pieces: tuple[str, list[str]]) -> None:
    text, several = pieces
    whole = parse(parser(tools, valid=valid), text, cut=cut)
    assert parse(parser(tools, valid=valid), *several, cut=cut) == whole
    assert parse(parser(tools, valid=valid), *text, cut=cut) == whole


@pytest.mark.parametrize("tools", [HERMES, LLAMA])
@given(text=texts)
def test_what_is_no_call_is_content_and_calls_are_json(tools: ToolFormat, text: str) -> None:
    _, content, calls = parse(parser(tools, thinks=False), text)
    for name, arguments in calls:
        assert name in NAMES
        assert isinstance(json.loads(arguments), dict)
        assert arguments in text or arguments == "{}"
    if not calls:
        assert content == text
    rest = iter(text)
    assert all(character in rest for character in content), "content is some of the text, in its order"


@given(reasoning=st.text(), content=st.text())
def test_reasoning_is_what_stands_between_the_tags(reasoning: str, content: str) -> None:
    reasoning, content = reasoning.replace("</think>", "").strip("\n"), content.strip("\n")
    text = f"<think>\n{reasoning}\n</think>\n\n{content}"
    assert parse(parser(None), text) == (reasoning, content, [])
    assert parse(AnswerParser(ReasoningParser("open"), None), text.removeprefix("<think>")) == (reasoning, content, [])
    assert parse(AnswerParser(ReasoningParser("none"), None), text) == ("", text, [])


def test_thinking_that_does_not_end_is_reasoning() -> None:
    assert parse(parser(HERMES), f"<think>\nI could {CALL} </thi") == (f"I could {CALL} </thi", "", [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
argument_objects = st.dictionaries(st.text(), json_values, max_size=3)


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("tools", [HERMES, LLAMA])
@given(
    calls=st.lists(st.tuples(st.from_regex(r"[a-z_-]{1,9}", fullmatch=True), argument_objects), min_size=1, max_size=3)
)
def test_calls_come_back_as_they_were_written(
    tools: ToolFormat, valid: bool, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=len(name) % 2 == 0)) for name, arguments in calls]
    text = tools.separator.join(tools.begin + name + tools.middle + text + tools.end for name, text in written)
    names = [name for name, _ in calls]
    assert parse(parser(tools, names, valid=valid), text) == ("", "", written)
    assert parse(parser(tools, names, valid=valid), *f"<think>hm</think>\n\n{text}") == ("hm", "", written)


def test_a_call_that_a_grammar_holds_comes_as_it_is_written() -> None:
    for tools in (HERMES, LLAMA):
        text = tools.begin + "f" + tools.middle + '{"city": "Rome"}' + tools.end
        deltas = [delta for part in map(parser(tools, valid=True).push, text) for delta in part.tool_calls]
        assert [delta.name for delta in deltas] == ["f"] + [None] * len('{"city": "Rome"}')
        assert [delta.arguments for delta in deltas] == ["", *'{"city": "Rome"}']
        assert deltas[0].to_dict() == {
            "index": 0,
            "id": deltas[0].id,
            "type": "function",
            "function": {"name": "f", "arguments": ""},
        }
        assert deltas[1].to_dict() == {"index": 0, "function": {"arguments": "{"}}


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("tools", [HERMES, LLAMA])
def test_a_call_that_is_cut(tools: ToolFormat, valid: bool) -> None:
    """It is a call from where its arguments begin on, and before that no content; wherever it is cut."""
    whole = tools.begin + "weather" + tools.middle + '{"city": "Rome"}'
    arguments = len(tools.begin + "weather" + tools.middle)
    for end in range(whole.index('"name": ') + 9, len(whole) + 1):
        calls = [("weather", whole[arguments:end])] if end > arguments else []
        assert parse(parser(tools, ["rain", "weather"], valid=valid), whole[:end], cut=True) == ("", "", calls)
        other = parse(parser(tools, ["rain"], valid=valid, thinks=False), whole[:end], cut=True)
        name = whole.index("weather")
        assert other == (("", "", []) if end <= name else ("", whole[:end], []))
    for end in range(arguments):
        only = parser(tools, ["weather"], required=True, valid=valid, thinks=False)
        assert parse(only, whole[:end], cut=True) == ("", "", [])
    assert parse(parser(tools), "so <", cut=True) == ("", "so <", [])
    tag = PARSERS[tools].opening
    assert parse(parser(tools), f"{tag}\n", cut=True) == ("", "", [])
    assert parse(parser(tools), f"{tag}\n") == ("", f"{tag}\n", [])


def test_a_closing_tag_that_is_cut() -> None:
    text = CALL.removesuffix("call>")
    assert parse(parser(HERMES), text, cut=True)[1:] == ("", [("f", '{"a": "}\\"</tool_call>"}')])


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("inside", ['"name": "f"', '"name": "f", "type": "function"', '"name": "f", "arguments": null'])
@pytest.mark.parametrize("tools", [HERMES, LLAMA])
def test_a_call_without_arguments(tools: ToolFormat, inside: str, valid: bool) -> None:
    text = "<tool_call>{" + inside + "}</tool_call>" if tools is HERMES else "{" + inside + "}"
    assert parse(parser(tools, valid=valid), text) == ("", "", [("f", "{}")])
    assert parse(parser(tools, ["g"], valid=valid), text) == ("", text, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I look. \n{CALL}\n{CALL}\n\nDone.", "I look.Done.", 2),
        ('<tool_call>{"arguments": {}, "name": "f"}', "", 1),
        ('<tool_call>\n{"name": "f", "arguments": {"a": }\n</tool_call>', None, 0),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>', None, 0),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "line\nline"}}\n</tool_call>', None, 0),
        ('<tool_call>\n{"name": "f", "arguments": "none"}\n</tool_call>', None, 0),
        ('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', None, 0),
        ('<tool_call>\n{"name": "f", "born": 1815}\n</tool_call>', None, 0),
        ('<tool_call>\n{"name": ["f"], "arguments": {}}\n</tool_call>', None, 0),
        ('<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>', None, 0),
        ("<tool_call>\nf(1)\n</tool_call>", None, 0),
        (f'<tool_call>\n{{"name": "f", \n</tool_call>\n{CALL}', '<tool_call>\n{"name": "f", \n</tool_call>', 1),
        (f"<tool_call> {CALL}", "<tool_call>", 1),
        ("a <tool_call> b", None, 0),
        ("ends with <tool_ca", None, 0),
        ("int main() { return 0; }\n", None, 0),
    ],
)
def test_tagged_calls(text: str, content: str | None, calls: int) -> None:
    _, found, called = parse(parser(HERMES), text)
    assert (found, len(called)) == (text if content is None else content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', "", ["f"]),
        ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", ["f", "g"]),
        (' {"type": "function", "name": "f", "parameters": {}}\n{"name": "g", "arguments": {}}', "", ["f", "g"]),
        ('{"name": "f", "parameters": {}};\n Done.', "Done.", ["f"]),
        ('{"answer": {"name": "f", "parameters": {}}}', None, []),
        ('{"name": "Ada", "born": 1815}', None, []),
        ('{"name": "Ada"}', None, []),
        ('{"name": "Ada", "parameters": {}}', None, []),
        ('{"name": "f", "parameters": {"a": 1}', None, []),
        ('See: {"name": "f", "parameters": {}}', None, []),
        ('<|python_tag|>print("hi")', None, []),
        ("<|pyth", None, []),
        ("{ x } {", None, []),
        ("  ", None, []),
    ],
)
def test_bare_calls(text: str, content: str | None, calls: list[str]) -> None:
    _, found, called = parse(parser(LLAMA, thinks=False), text)
    assert (found, [name for name, _ in called]) == (text if content is None else content, calls)


def test_an_object_that_is_no_call_is_not_waited_for() -> None:
    assert parser(LLAMA).push('{"city": "Rome", ').content == '{"city": "Rome", '


def test_a_template_says_what_its_model_speaks() -> None:
    assert (formats_of(QWEN3).tools, formats_of(QWEN3).thinks) == (HERMES, True)
    assert (formats_of(LLAMA3).tools, formats_of(LLAMA3).thinks) == (LLAMA, False)
    plain = formats_of("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert (plain.tools, plain.thinks) == (None, False) == (formats_of(None).tools, formats_of(None).thinks)
    offered = read_tool_use([{"type": "function", "function": {"name": "f"}}], "none", None)
    with pytest.raises(InvalidField, match=r"^tools: the model's chat template has no tools in"):
        plain.answer_format(offered, "", None)
    assert plain.answer_format(read_tool_use(None, None, None), "", None).structured_outputs is None


@pytest.mark.parametrize(
    ("tail", "thinking"),
    [
        ("<|im_start|>assistant\n", "possible"),
        ("<|im_start|>assistant\n<think>\n", "open"),
        ("<think>\n\n</think>\n\n", "none"),
    ],
)
def test_the_prompt_says_where_thinking_is(tail: str, thinking: str) -> None:
    assert thinking_after(tail) == thinking


def test_deltas_hold_what_was_decided() -> None:
    reading = parser(HERMES)
    assert reading.push("<think>a").reasoning == "a"
    assert reading.push("</think>b").content == "b"
    call = reading.push(CALL).tool_calls
    assert [type(delta) for delta in call] == [ToolCallDelta] * 2 and call[0].name == "f"
