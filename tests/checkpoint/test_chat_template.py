"""Chat templates rendered, against transformers' own rendering; and templates that do what none should."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from dflash_trt.checkpoint import chat_template
from dflash_trt.checkpoint.chat_template import TemplateFailure, render
from tests.conftest import TINY
from tests.serving.templates import TEMPLATES

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Rain in <Köln>?"}]
CALL = {
    "id": "abcdefgh1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1]}},
}
CALLS = [
    *MESSAGES,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "sun"},
]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSun."}, *MESSAGES]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a <city>", "parameters": {}}}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TINY / "target", local_files_only=True)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", [MESSAGES, ANSWERED, CALLS], ids=["question", "answer", "call"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_transformers_own(
    tokenizer: PreTrainedTokenizerFast, name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>", **tokenizer.special_tokens_map}

    def by_transformers() -> str:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=TEMPLATES[name],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
                **special,
            )
        )

    try:
        text = render(
            TEMPLATES[name], messages, tools=tools, add_generation_prompt=True, enable_thinking=False, **special
        )
    except TemplateFailure:
        with pytest.raises(Exception, match=r"roles must|concatenate|no element 0"):
            by_transformers()
    else:
        assert text == by_transformers()


def test_the_environment_is_that_of_transformers() -> None:
    theirs, ours = _compile_jinja_template("").environment, chat_template._SANDBOX
    assert ours.filters.keys() == theirs.filters.keys()
    assert ours.tests.keys() == theirs.tests.keys()
    assert ours.globals.keys() == theirs.globals.keys() - {"lipsum"}
    assert (ours.trim_blocks, ours.lstrip_blocks) == (theirs.trim_blocks, theirs.lstrip_blocks) == (True, True)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index ~ loop.length ~ loop.last ~ m.role }}{{ m['content'] | upper }}{% endfor %}",
        "{% for m in messages if m.x %}{% else %}none{% endfor %}{% for m in missing %}x{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{% break %}{% endfor %}end",
        "{% macro show(a, b='é') %}{{ a ~ b }}{{ caller() if caller }}{% endmacro %}{{ show(1) }}"
        "{% call show('x') %}{{ messages[0].content }}{% endcall %}",
        "{% for key, value in {'a': 1, 'b': none}.items() %}{{ key }}={{ value }} {% endfor %}{{ 7 % 3 + 2 ** 3 * 2 }}",
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content %}{% endfor %}{{ ns.x }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ {'é': [1, true, '<b>']} | tojson(indent=2) }}",
        "{{ '%s and %d' % ('a', 3) }}{{ '{:>4}|{x}'.format(7, x='y') }}{{ ['a', 'b'] | join('-') }}{{ 'aba'.replace('a', 'cc') }}",
        "{% set x %}{{ messages[0].content }}{{ none }}{% endset %}{{ x | trim }}{{ undefined_name }}{{ [1] + [2] }}",
        "{%- for m in messages recursive %}{{ m.content }}{{ loop(m.inner) if m.inner }}{% endfor -%}  {{ strftime_now('%') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}{{ messages | length }}",
        "{{ range(3) | list }}{{ (messages | first).content[:3] }}{{ 'x' * 3 }}{{ 10**10**10 }}{{ true ~ 1.5 ~ none }}",
    ],
)
def test_constructs_of_templates(template: str) -> None:
    assert render(template, MESSAGES) == _compile_jinja_template(template).render(messages=MESSAGES)


@pytest.mark.parametrize(
    ("template", "failure"),
    [
        ("{{ messages[0].content | length / 0 }}", r"fails on the messages \(ZeroDivisionError: division by zero\)"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"fails on the messages \(RecursionError"),
        ("{% include 'x' %}", r"fails on the messages \(TypeError: no loader"),
        ("{% import '/etc/passwd' as x %}", r"fails on the messages \(TypeError: no loader"),
        ("{{ messages.x.y }}", "refuses the messages: .*has no attribute 'x'"),
        ("{{ messages.append(1) }}", "refuses the messages: .*unsafe"),
        ("{{ messages.__class__.__mro__ }}", "refuses the messages: .*unsafe"),
        ("{{ raise_exception('not so') }}", "refuses the messages: not so"),
        ("{{ raise_exception(3) }}", "refuses the messages: 3"),
        ("\n{% if %}", "is no valid Jinja \\(line 2"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "fails on the messages"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "fails on the messages"),
        ("{% for a in range(10**9) %}{% endfor %}", "longer than|steps"),
        ("{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}", "more than 100,000 steps"),
        ("{% for a in range(99999) %}{{ a | trim }}{% endfor %}", "more than 100,000 steps"),
        ("{% for a in range(99999) %}{{ messages[0].content.strip() }}{% endfor %}", "more than 100,000 steps"),
        ("{% macro f(n) %}{{ f(n - 1) + f(n - 1) if n }}{% endmacro %}{{ f(60) }}", "more than 100,000 steps"),
        ("{% for a in range(9999) %}" + "x" * 99_999 + "{% endfor %}", "more than 100,000 steps"),
        ("{% for a in range(999) %}{{ range(99999) | list | sort | length }}{% endfor %}", "more than 100,000 steps"),
        *(
            (
                "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = "
                + grown
                + " %}{% endfor %}{{ ns.x }}",
                failure,
            )
            for grown, failure in [
                ("ns.x + ns.x", "longer than|steps"),
                ("ns.x ~ ns.x", "longer than|steps"),
                ("ns.x * 2", "longer than|steps"),
                ("[ns.x, ns.x] | join('')", "longer than|steps"),
                ("ns.x.replace('x', 'xx')", "longer than|steps"),
                ("[ns.x] + [ns.x]", "more than 100,000 steps"),
                ("[ns.x, ns.x]", "more than 100,000 steps"),
                ("{'a': ns.x, 'b': ns.x}", "more than 100,000 steps"),
            ]
        ),
        (
            "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set b %}{{ ns.x }}{{ ns.x }}{% endset %}"
            "{% set ns.x = b %}{% endfor %}",
            "longer than|steps",
        ),
        ("{% set ns = namespace(x=3) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", "bits"),
        ("{% set x = (10 ** 9) ** (10 ** 9) %}", "bits"),
        *(
            ("{{ " + expression + " }}", "longer than|six digits|steps")
            for expression in [
                "'x' * 10 ** 10",
                "[1] * 10 ** 10",
                "'x' | center(10 ** 10)",
                "'x'.rjust(10 ** 10)",
                "'a\tb'.expandtabs(10 ** 10)",
                "'x' | indent(10 ** 10)",
                "'%10000000000d' % 3",
                "'%*d' % (10 ** 10, 3)",
                "'{:>10000000000}'.format(3)",
                "(range(99999) | list) | join('x' * 99999)",
                "('x' * 99999).join(range(99999) | map('string') | list)",
            ]
        ),
    ],
)
def test_what_no_template_may_do(template: str, failure: str) -> None:
    with pytest.raises(TemplateFailure, match=rf"^the chat template .*({failure})"):
        render(template, MESSAGES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_long_conversations_stay_within_the_bound(name: str) -> None:
    messages = [{"role": "assistant" if index % 2 else "user", "content": "Yes. " * 50} for index in range(4001)]
    content = [{"type": "text", "text": messages[0]["content"]}]
    messages = [{**message, "content": content} for message in messages] if name == "parts" else messages
    text = render(TEMPLATES[name], messages, add_generation_prompt=True, bos_token="", eos_token="")
    assert text.count("Yes.") == 50 * len(messages)
