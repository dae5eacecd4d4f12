"""Grammars of llama.cpp keep their meaning, however their parts overlap."""

from __future__ import annotations

import re

import pytest

from dflash_trt.runtime.gbnf import InvalidGrammar, lark_rules
from dflash_trt.runtime.lark import Lark
from tests.runtime.byte_engine import is_accepted, matcher_of

ARITHMETIC = r"""
# spaces may stand between parts
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        ('root ::= "x" | "(" root ")"', ["x", "((x))"], ["", "(x", "xx"]),
        ('root ::= [a-z]+ "b"', ["ab", "abb", "zzb"], ["b", "a"]),
        ('root ::= ("b" | "bc") "c"', ["bc", "bcc"], ["b", "bccc"]),
        ("root ::= word other\nword ::= [^0-9]*\nother ::= [ab]{2,3}", ["ab", "xaba", "aaaa"], ["a", "x"]),
        (r'root ::= "\x41\u00e9\U0001F600\n\t\r\"\\\[\]" [\x41-\x43\]\\^-]', ["Aé😀\n\t\r\"\\[]B", "Aé😀\n\t\r\"\\[]^"], ["A"]),
        ("root ::= [^\\n\"]+ | .", ["a b", "\n", "é"], ['a"b', ""]),
        ('root ::=\n  "a" |\n  "b"\n  | "c" # or\n\nother ::= "d"', ["a", "b", "c"], ["d"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "a"{2} "b"{1,} ("c" | )?', ["aab", "aabbc"], ["ab", "aa"]),
        ('root ::= a-b | A_1\na-b ::= "x"\nA_1 ::= root "y"', ["x", "xyy"], ["y"]),
        (ARITHMETIC, ["a=1\n", "(a +2)*b_1 = 3\n", "1 =2\nx=y \n"], ["a=\n", "a = 1", "=1\n"]),
    ],
)  # fmt: skip
def test_texts_of_a_grammar(grammar: str, accepted: list[str], refused: list[str]) -> None:
    rules, root = lark_rules(grammar, "g")
    matcher = matcher_of(Lark(root, rules))
    for text in accepted + refused:
        assert is_accepted(matcher, text) == (text in accepted), text


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("", "has no rule root"),
        ('other ::= "a"', "has no rule root"),
        ("root ::= absent", "has no rule absent"),
        ('root ::= "a"\nroot ::= "b"', "has the rule root twice, in line 2"),
        ('root ::= ("a"', "does not close a group, in line 1"),
        ('root ::= "a")', r"needs a rule, name ::= \.\.\., in line 1"),
        ('root ::= "a', "is malformed, in line 1"),
        ("root ::= [a", "is malformed"),
        ("root ::= []", "has an empty class"),
        ("root ::= [z-a]", "has the range z-a, which is empty"),
        (r'root ::= "\q"', "has an unknown escape"),
        (r'root ::= "\UFFFFFFFF"', "has the character FFFFFFFF, which is none"),
        ("root ::= *", "repeats nothing"),
        ('root ::= "a"{3,2}', "repeats 3 to 2 times"),
        ('root ::= "a"{99999}', "repeats 99999 to 99999 times"),
        ('root ::= "a" ::= "b"', "is malformed"),
        ('"a"', "needs a rule"),
        ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "too many groups in one another"),
        ('root ::= "\ud800"', "a lone surrogate"),
    ],
)
def test_what_is_no_grammar_is_told_with_its_line(grammar: str, problem: str) -> None:
    with pytest.raises(InvalidGrammar, match=problem) as refused:
        lark_rules(grammar, "g")
    assert "\n" not in str(refused.value)


def test_names_of_rules_do_not_meet_those_around_them() -> None:
    rules, root = lark_rules('root ::= start\nstart ::= "a"', "g")
    assert root == "g0" and re.fullmatch(r"(g\d: .*\n)+", rules)
