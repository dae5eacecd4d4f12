"""Rewritten expressions against the engines whose meaning they keep: Python's, and ECMA's as a validator has it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator

from dflash_trt.runtime.lark import Lark
from dflash_trt.runtime.regular_expression import UnsupportedRegex, class_of, ecma_search, literal, python_fullmatch
from tests.runtime.byte_engine import is_accepted, matcher_of

TEXTS = [
    *("", "a", "b", "ab", "ba", "abc", "aab", "a\n", "\n", "a\nb", "a\rb", "a\u2028b", "a b", "A", "1", "a1", "_"),
    *("é", "²", "\u0301", "\u0661", "\u00a0", "\u0085", "\ufeff", "\x1c", "\ud7ff", "\ue000", "\U0001f600", "/", '"', "\\"),
]  # fmt: skip

PIECES = st.sampled_from(
    ["a", "b", ".", r"\w", r"\W", r"\d", r"\s", r"\S", "[ab]", "[^a]", r"[^\s\d]", "[a-é]", r"\n", r"\x61", "", r"\/", "é"]
)  # fmt: skip


@st.composite
def patterns(draw: st.DrawFn, depth: int = 2) -> str:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        piece = draw(PIECES)
        if depth and draw(st.integers(0, 3)) == 0:
            piece = f"({draw(st.sampled_from(['', '?:']))}{draw(patterns(depth - 1))})"
        if piece and draw(st.integers(0, 2)) == 0:
            piece += draw(st.sampled_from(["*", "+", "?", "*?", "{1,2}", "{2}", "{0,1}?"]))
        parts.append(piece)
    return draw(st.sampled_from(["", "^", "^", "("])) + "".join(parts) + draw(st.sampled_from(["", "$", "|b$", "|^a"]))


@given(pattern=patterns())
@settings(max_examples=150, deadline=None)
def test_python_fullmatch_has_the_texts_of_python(pattern: str) -> None:
    try:
        expected = re.compile(pattern)
        written = python_fullmatch(pattern)
    except (re.error, UnsupportedRegex):
        return
    matcher = matcher_of(Lark(f"/{written}/"))
    for text in TEXTS:
        assert is_accepted(matcher, text) == bool(expected.fullmatch(text)), (pattern, text)


@given(pattern=patterns())
@settings(max_examples=150, deadline=None)
def test_ecma_search_has_the_texts_of_a_validator(pattern: str) -> None:
    try:
        written = ecma_search(pattern)
    except UnsupportedRegex:
        return
    expected, matcher = Draft202012Validator({"pattern": pattern}), matcher_of(Lark(f"/{written}/"))
    for text in TEXTS:
        if re.search("[\r\u2028\u0085\ufeff]", text):  # Rust's `.` and `\\s`, which the validator uses, are not ECMA's
            continue
        assert is_accepted(matcher, text) == expected.is_valid(text), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        (r"\Aa\Z", ["a"], ["a\n", "Aa", "aZ"]),
        (r"^a$|^b$", ["a", "b"], ["a\n", "ab"]),
        (r"(^a|b)c", ["ac", "bc"], ["abc"]),
        (r"a.b", ["a\rb", "a\u2028b"], ["a\nb"]),
        (r"(?s)a.b", ["a\nb"], ["ab"]),
        (r"(?x) a b  # c", ["ab"], ["a b"]),
        (r"(?a)\w\d", ["a1"], ["é1", "a\u0661"]),
        (r"\w\d", ["é\u0661", "²1"], ["\u03011", "-1"]),
        (r"a*?b??", ["", "aab"], ["abb"]),
        (r"[^\x00-\ud7ff]", ["\ue000", "\U0001f600"], ["a", "\ud7ff"]),
        (r"[^\x00-\ud7ff\ue000-\U0010ffff]|a", ["a"], ["\ud7ff", "\ue000"]),
        (r"[^\s\S]|a", ["a"], ["b", ""]),
        (r"[\]/\"\\-]+", ["]/\"\\-"], ["a"]),
        (r"(?P<n>a){2,}", ["aa", "aaa"], ["a"]),
    ],
)  # fmt: skip
def test_python(pattern: str, accepted: list[str], refused: list[str]) -> None:
    matcher = matcher_of(Lark(f"/{python_fullmatch(pattern)}/"))
    for text in accepted + refused:
        assert bool(re.fullmatch(pattern, text)) == (text in accepted) == is_accepted(matcher, text), text


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        ("a.c", ["xabcx"], ["a\nc", "a\rc", "a\u2028c"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("$", ["", "a\n"], []),
        (r"^\d$", ["1"], ["\u0661", "1\n"]),
        (r"^\w$", ["a", "_"], ["é"]),
        (r"^\s$", ["\ufeff", "\u00a0"], ["\u0085", "\x1c"]),
        (r"^(?<year>\d{4})-\d\d$", ["2026-12"], ["26-12"]),
        (r"^\u00e9\x61\/\-$", ["éa/-"], ["éa/"]),
        ("(a|^b|c$)", ["xax", "bx", "xc"], ["xbx", "cx"]),
        ("^a{2$", ["a{2"], ["aa"]),
    ],
)
def test_ecma(pattern: str, accepted: list[str], refused: list[str]) -> None:
    matcher = matcher_of(Lark(f"/{ecma_search(pattern)}/"))
    for text in accepted + refused:
        assert is_accepted(matcher, text) == (text in accepted), text


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(?=a)b", "a lookahead or lookbehind"),
        ("(?!a)b", "a lookahead or lookbehind"),
        ("b(?<=b)", "a lookahead or lookbehind"),
        ("(?!)", "a lookahead or lookbehind"),
        (r"(a)\1", "a backreference"),
        (r"(a)?(?(1)b|c)", "a conditional group"),
        (r"\bfoo", "a word boundary"),
        (r"a\Bb", "a word boundary"),
        ("a$b", "an anchor inside"),
        (r"a\n^b", "an anchor inside"),
        (r"(a\Z)*", "an anchor inside"),
        ("(?i)a", "flags other than"),
        ("(?m)^a$", "flags other than"),
        ("(?i:a)", "flags other than"),
        ("a{100001}", "a repetition of more than"),
        ("[\ud800-\udfff]x\ud800", "a lone surrogate"),
        ("(a", "missing \\)"),
        ("a**", "multiple repeat at position 2"),
        (r"\p{L}", r"bad escape \\p"),
        ("(" * 3000 + ")" * 3000, "too large or too deep"),
    ],
)
def test_python_that_cannot_be_kept_is_named(pattern: str, problem: str) -> None:
    with pytest.raises(UnsupportedRegex, match=problem) as refused:
        python_fullmatch(pattern)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (r"\p{L}", r"\\p is not"),
        (r"\A", r"\\A is not"),
        (r"\cA", r"\\c is not"),
        (r"\u{61}", r"\\u is not"),
        (r"\01", r"\\0 is not"),
        ("[]a]", r"\[\] is not"),
        ("[^]", r"\[\^\] is not"),
        ("a{,3}", "{, is not"),
        ("(?i)a", r"\(\? is not"),
        ("(?P<n>a)", r"\(\? is not"),
        (r"\bfoo", "a word boundary"),
        (r"(?<n>a)\k<n>", "bad escape"),
        ("(?<!a)b", "a lookahead or lookbehind"),
        ("x$y", "an anchor inside"),
    ],
)
def test_ecma_that_cannot_be_kept_is_named(pattern: str, problem: str) -> None:
    with pytest.raises(UnsupportedRegex, match=problem):
        ecma_search(pattern)


@given(text=st.text())
@settings(max_examples=30, deadline=None)
def test_a_literal_is_its_text(text: str) -> None:
    matcher = matcher_of(Lark(f"/{literal(text + 'x')}/"))
    assert is_accepted(matcher, text + "x") and not is_accepted(matcher, text)


@given(ranges=st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF)).map(sorted), max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_class_and_all_others(ranges: list[list[int]]) -> None:
    pairs = [(first, last) for first, last in ranges]
    inside, outside = (matcher_of(Lark(f"/{class_of(pairs, negated=negated)}|zz/")) for negated in (False, True))
    for code in {end + step for pair in pairs for end in pair for step in (-1, 0, 1)} | {0, 0xD7FF, 0xE000, 0x10FFFF}:
        if 0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
            belongs = any(first <= code <= last for first, last in pairs)
            assert (is_accepted(inside, chr(code)), is_accepted(outside, chr(code))) == (belongs, not belongs)
