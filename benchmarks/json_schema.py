"""What grammar engines enforce of JSON schemas, on the public JSON Schema test suite, and what their masks cost.

    python benchmarks/json_schema.py SUITE [--engine dflash-trt --engine llguidance --engine xgrammar] [--details]

SUITE is a gzipped JSON file, [{"keyword", "schema", "tests": [{"data", "valid"}]}]. A document is reachable where one
of its spellings is: compact, with spaces, and indented; up to four properties in any order; integers as floats, with
exponents, and back; strings raw, and with \\u escapes. A schema is `enforced` where all valid documents are reachable
and no invalid one is, `refused` where the engine says that it cannot, and else `wrong`. Byte by byte, without tokens.
xgrammar is no dependency: pip install xgrammar==0.2.9.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Accepts = Callable[[str], bool]
_MARK = "\ue000"
_MARKED = re.compile(r'"(?:\ue000|\\ue000)([^"\\\ue000]*)(?:\ue000|\\ue000)"')


class Refused(Exception):
    """The engine says that it cannot enforce a schema."""


def dflash_trt() -> Callable[[Any], Accepts]:
    """This project: llguidance behind a rewriting that refuses what it does not enforce."""
    from dflash_trt.runtime.lark import json_lark
    from dflash_trt.runtime.unsupported_schema import UnsupportedSchema

    compile_text = _lark_compiler()

    def compiled(schema: Any) -> Accepts:
        try:
            return compile_text(json_lark(schema).text)
        except UnsupportedSchema as error:
            raise Refused(str(error)) from None

    return compiled


def llguidance() -> Callable[[Any], Accepts]:
    """llguidance as it is."""
    compile_text = _lark_compiler()
    return lambda schema: compile_text(f"start: %json {json.dumps(schema)}")


def _lark_compiler() -> Callable[[str], Accepts]:
    from llguidance import LLMatcher, LLTokenizer

    class Bytes:
        is_tokenizer_wrapper = True
        bos_token_id = None
        eos_token_id = 256
        special_token_ids = (256,)
        tokens = (*(bytes([byte]) for byte in range(256)), b"end")

    tokenizer = LLTokenizer(Bytes())  # type: ignore[arg-type]

    def compiled(text: str) -> Accepts:
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(text), log_level=0)
        if matcher.is_error():
            raise Refused(matcher.get_error().splitlines()[0])

        def accepts(document: str) -> bool:
            tokens = list(document.encode())
            fits = matcher.try_consume_tokens(tokens)
            accepted = fits == len(tokens) and matcher.is_accepting()
            matcher.rollback(fits)
            return accepted

        return accepts

    return compiled


def xgrammar() -> Callable[[Any], Accepts]:
    """xgrammar as it is."""
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    def compiled(schema: Any) -> Accepts:
        try:
            grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), strict_mode=False)
        except (RuntimeError, ValueError) as error:
            raise Refused(str(error)) from None
        return lambda document: bool(_is_grammar_accept_string(grammar, document))

    return compiled


ENGINES = {"dflash-trt": dflash_trt, "llguidance": llguidance, "xgrammar": xgrammar}


def spellings(value: Any) -> Iterator[str]:
    """Texts of one document."""
    seen: set[str] = set()
    for ordered in _orders(value):
        for numbers in (None, int, float, "e"):
            spelled = _with_numbers(ordered, numbers)
            for separators, indent in (((",", ":"), None), ((", ", ": "), None), (None, 2)):
                for escape in (False, True):
                    text = json.dumps(spelled, separators=separators, indent=indent, ensure_ascii=escape)
                    text = _MARKED.sub(r"\1", text)
                    if text not in seen:
                        seen.add(text)
                        yield text


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict) and value:
        keys = itertools.permutations(value) if len(value) <= 4 else iter([tuple(value), tuple(reversed(value))])
        for order in keys:
            for values in itertools.islice(itertools.product(*(list(_orders(value[key])) for key in order)), 24):
                yield dict(zip(order, values, strict=True))
    elif isinstance(value, list) and value:
        for values in itertools.islice(itertools.product(*(list(_orders(each)) for each in value)), 24):
            yield list(values)
    else:
        yield value


def _with_numbers(value: Any, kind: Any) -> Any:
    """Integral numbers in another spelling, where their value stays; "e" is a mark that becomes an exponent."""
    if isinstance(value, dict):
        return {key: _with_numbers(each, kind) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each, kind) for each in value]
    if isinstance(value, bool) or not isinstance(value, int | float) or kind is None or value != int(value):
        return value
    if kind == "e":
        return f"{_MARK}{int(value)}e0{_MARK}"
    return int(value) if kind is int else float(value) if abs(value) <= 2**53 else value


def judged(accepts: Accepts, tests: list[dict[str, Any]]) -> list[str]:
    """What is wrong, a line each."""
    wrong = []
    for test in tests:
        reached = next((text for text in spellings(test["data"]) if accepts(text)), None)
        if (reached is not None) != test["valid"]:
            wrong.append(f"reachable: {reached}" if reached is not None else f"shut out: {json.dumps(test['data'])}")
    return wrong


def main() -> None:
    """Print a table of engines, and with --details each schema that is wrong or refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="by default all but xgrammar")
    parser.add_argument("--details", action="store_true")
    options = parser.parse_args()
    suite = json.loads(gzip.decompress(options.suite.read_bytes()))
    print("| engine | enforced | refused by name | wrong | compile |\n|---|---|---|---|---|")
    for name in options.engine or ["dflash-trt", "llguidance"]:
        compile_schema = ENGINES[name]()
        counts: Counter[str] = Counter()
        lines, took = [], 0.0
        for case in suite:
            started = time.perf_counter()
            try:
                accepts = compile_schema(case["schema"])
            except Refused as error:
                counts["refused"] += 1
                lines.append(f"refused {case['keyword']}: {json.dumps(case['schema'])[:200]}: {error}")
                continue
            finally:
                took += time.perf_counter() - started
            wrong = judged(accepts, case["tests"])
            counts["wrong" if wrong else "enforced"] += 1
            lines += [f"WRONG {case['keyword']}: {json.dumps(case['schema'])}: {each}" for each in wrong]
        shown = [f"{counts[kind]}" for kind in ("enforced", "refused", "wrong")]
        print(f"| {name} | {' | '.join(shown)} | {took / len(suite) * 1000:.2f} ms |", flush=True)
        if options.details:
            print("\n".join(lines))


if __name__ == "__main__":
    main()
