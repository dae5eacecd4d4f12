"""What the grammars of answers let through, and that it is what the parsers read."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_trt.checkpoint.tokenizer import save_tokenizer
from dflash_trt.examples.smollm2 import gguf_file
from dflash_trt.runtime.detokenizer import Detokenizer
from dflash_trt.runtime.grammar import GrammarMask
from dflash_trt.runtime.grammar_compiler import GrammarCompiler
from dflash_trt.runtime.lark import Lark, lark
from dflash_trt.runtime.structured import StructuredOutputs
from dflash_trt.serving.formats import ParsedAnswer, formats_of
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.tokens import TokenTexts
from dflash_trt.serving.tools import read_tool_use
from tests.conftest import TINY
from tests.runtime.byte_engine import is_accepted
from tests.serving.templates import LLAMA3, QWEN3

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PADDING = 100
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def tool(name: str, parameters: object = CITY, **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


def accepted(asked: StructuredOutputs | Lark | None, *texts: str) -> list[bool]:
    assert asked is not None
    grammar = asked if isinstance(asked, Lark) else lark(asked)
    return [is_accepted(grammar, text) for text in texts]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


@pytest.mark.parametrize(
    ("template", "write", "separator"), [(QWEN3, hermes, "\n"), (LLAMA3, llama, "; ")], ids=["qwen3", "llama3"]
)
def test_calls_that_must_be_made(template: str, write: Any, separator: str) -> None:
    one, two = write("f", '{"city": "Rome"}'), write("g", '{ "x": 1 }')
    texts = (one, one + separator + two, write("f", '{"town": "Rome"}'), write("h", '{"city": "Rome"}'), "Rome", "")
    tools = [tool("f"), tool("g", {})]
    for choice, parallel, expected in (
        ("required", None, [True, True, False, False, False, False]),
        ("required", False, [True, False, False, False, False, False]),
        ({"type": "function", "function": {"name": "f"}}, None, [True, False, False, False, False, False]),
    ):
        use = read_tool_use(tools, choice, parallel)
        answer_format = formats_of(template).answer_format(use, CLOSED, None)
        assert accepted(answer_format.structured_outputs, *texts) == expected
        answer, reading = ParsedAnswer(), answer_format.new_parser()
        answer.add(reading.push(one))
        answer.add(reading.finish(cut=False))
        assert answer.content == ""
        assert [call["function"] for call in answer.tool_calls] == [{"name": "f", "arguments": '{"city": "Rome"}'}]


def test_calls_that_may_be_made() -> None:
    formats, right, wrong = formats_of(QWEN3), hermes("f", '{"city": "Rome"}'), hermes("f", '{"town": 1}')
    assert formats.answer_format(read_tool_use([tool("f")], "auto", None), CLOSED, None).structured_outputs is None
    assert formats.answer_format(read_tool_use([tool("f")], "none", None), CLOSED, None).structured_outputs is None
    strict = formats.answer_format(read_tool_use([tool("f", strict=True)], None, None), CLOSED, None)
    texts = ("Rome", right, f"I ask. {right}\n{right}", wrong)
    assert accepted(strict.structured_outputs, *texts) == [True, True, True, False]
    single = formats.answer_format(read_tool_use([tool("f")], None, False), CLOSED, None)
    assert accepted(single.structured_outputs, *texts) == [True, True, False, True]


def test_calls_or_the_form_that_is_asked_for() -> None:
    formats, call = formats_of(QWEN3), hermes("f", '{"city": "Rome"}')
    texts = (call, '{"age": 3}', "yes", "Rome")
    for asked, expected in (
        (
            StructuredOutputs(json={"type": "object", "properties": {"age": {"type": "integer"}}}),
            [True, True, False, False],
        ),
        (StructuredOutputs(json='{"type": "object"}'), [True, True, False, False]),
        (StructuredOutputs(json_object=True), [True, True, False, False]),
        (StructuredOutputs(choice=["yes", "no"]), [True, False, True, False]),
        (StructuredOutputs(regex="y.s"), [True, False, True, False]),
        (StructuredOutputs(grammar='root ::= "yes"'), [True, False, True, False]),
    ):
        use = read_tool_use([tool("f")], "auto", None)
        assert accepted(formats.answer_format(use, CLOSED, asked).structured_outputs, *texts) == expected
        required = read_tool_use([tool("f")], "required", None)
        answer_format = formats.answer_format(required, CLOSED, asked)
        assert accepted(answer_format.structured_outputs, *texts) == [True, False, False, False]
        assert formats.answer_format(read_tool_use(None, None, None), CLOSED, asked).structured_outputs is asked


def test_thinking_comes_first_where_the_prompt_lets_it() -> None:
    formats, asked = formats_of(QWEN3), StructuredOutputs(choice=["yes"])
    texts = ("yes", "<think>\nhm\n</think>\n\nyes", "hm\n</think>\n\nyes", "<think>\nhm\n</think>\n\nno")
    for tail, expected in (
        ("<|im_start|>assistant\n", [True, True, False, False]),
        ("<|im_start|>assistant\n<think>\n", [False, False, True, False]),
    ):
        answer_format = formats.answer_format(read_tool_use(None, None, None), tail, asked)
        assert accepted(answer_format.structured_outputs, *texts) == expected


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "strin"}}}, ".properties.a.type: is no JSON schema"),
        ({"properties": {"a": {"$ref": "#/x"}}}, ".properties.a.$ref: is '#/x', which leads to nothing"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, ".properties.a.pattern: is '('"),
        ({"required": 5}, ".required: is no JSON schema"),
        ({"properties": {"a": {"uniqueItems": True}}}, ".properties.a.uniqueItems: is not supported"),
        ({"properties": {"a": False}, "required": ["a"]}, ": no value matches it"),
    ],
    ids=str,
)
def test_schemas_that_cannot_be_enforced_are_named(schema: dict[str, Any], place: str) -> None:
    use = read_tool_use([tool("f"), tool("g", schema)], "required", None)
    with pytest.raises(InvalidField) as refused:
        formats_of(LLAMA3).answer_format(use, CLOSED, None)
    assert str(refused.value).startswith(f"tools[1].function.parameters{place}")
    strict = read_tool_use([tool("g", schema, strict=True)], "auto", None)
    with pytest.raises(InvalidField) as refused:
        formats_of(QWEN3).answer_format(strict, CLOSED, None)
    assert str(refused.value).startswith(f"tools[0].function.parameters{place}")
    loose = read_tool_use([tool("f"), tool("g", schema)], "auto", None)
    assert formats_of(QWEN3).answer_format(loose, CLOSED, None).structured_outputs is None


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    if request.param == "tiny":
        return AutoTokenizer.from_pretrained(TINY / "target", local_files_only=True)
    directory = tmp_path_factory.mktemp("smollm2")
    save_tokenizer(gguf_file(), directory)
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerFast) -> GrammarCompiler:
    """Of a model whose vocabulary is padded beyond its tokenizer's."""
    return GrammarCompiler(tokenizer, len(tokenizer) + PADDING, [tokenizer.eos_token_id])


@pytest.mark.parametrize("template", [QWEN3, LLAMA3], ids=["qwen3", "llama3"])
def test_whatever_tokens_a_grammar_lets_through_are_calls_that_match(
    template: str, tokenizer: PreTrainedTokenizerFast, compiler: GrammarCompiler
) -> None:
    """Tokens drawn at random, as by a model that knows nothing of calls."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Köln"]}, "days": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    answer_format = formats_of(template).answer_format(
        read_tool_use(
            [tool("f", schema), tool("g", {"properties": {}, "additionalProperties": False})], "required", None
        ),
        CLOSED,
        None,
    )
    assert answer_format.structured_outputs is not None
    for seed in range(20 if len(tokenizer) < 1000 else 2):
        ids = drawn(compiler.mask(answer_format.structured_outputs), tokenizer, random.Random(seed))
        answer, reading, texts = ParsedAnswer(), answer_format.new_parser(), Detokenizer(tokenizer, ())
        for token in ids:
            answer.add(reading.push(texts.push(token)))
        answer.add(reading.push(texts.finish()))
        answer.add(reading.finish(cut=False))
        assert answer.content == "" and answer.tool_calls
        for call in answer.tool_calls:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "f":
                assert set(arguments) == {"city", "days"} and arguments["city"] in ("Rome", "Köln")
                assert all(isinstance(day, bool) for day in arguments["days"])
            else:
                assert (call["function"]["name"], arguments) == ("g", {})


def drawn(mask: GrammarMask, tokenizer: PreTrainedTokenizerFast, draw: random.Random) -> list[int]:
    """Tokens before the end, each of those that may follow as likely as any other."""
    ids: list[int] = []
    logits, guesses = torch.zeros(1, len(tokenizer) + PADDING), torch.empty(0, dtype=torch.int64)
    while not mask.is_complete:
        allowed = mask.apply(logits, guesses)[0].isfinite().nonzero()[:, 0].tolist()
        assert max(allowed) < len(tokenizer), "it may follow, and is no token"
        ids.append(draw.choice(allowed))
        if ids[-1] == tokenizer.eos_token_id:
            return ids[:-1]
        mask.record(ids[-1])
    return ids


def test_a_token_of_the_padding_is_no_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """A model that is held to nothing may choose it."""
    texts, padding = TokenTexts(tokenizer), len(tokenizer) + PADDING - 1
    assert texts.text(padding) == ""
    word = tokenizer.encode("Köln")
    assert "".join(map(texts.text, word)).replace("\N{REPLACEMENT CHARACTER}", "") in ("Köln", "Kln")
    detokenizer = Detokenizer(tokenizer, ())
    pushed = "".join(detokenizer.push(token) for token in (word[0], padding, *word[1:], padding))
    assert pushed + detokenizer.finish() == "Köln"
