"""What a structured output costs a step: llguidance, as this project drives it, beside xgrammar.

    python benchmarks/grammar_masks.py

With SmolLM2's tokenizer. Each form is walked token by token along a text that it has; then the same tokens are taken
back in blocks of seven. Times are of one processor, in turns, the median of all tokens. xgrammar is no dependency:
pip install xgrammar==0.2.9.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xgrammar
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_trt.checkpoint.tokenizer import save_tokenizer
from dflash_trt.examples.smollm2 import gguf_file
from dflash_trt.runtime.grammar_compiler import GrammarCompiler
from dflash_trt.runtime.structured import StructuredOutputs

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["old", "young"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON_TEXT = '{"name": "Clara who seeks the old map", "age": 41, "tags": ["old", "young"]}'
FORMS = {
    "JSON schema": (StructuredOutputs(json=PERSON), PERSON_TEXT),
    "any JSON object": (StructuredOutputs(json_object=True), PERSON_TEXT),
    "regex": (StructuredOutputs(regex="[A-Z][a-z ]+( and [a-z ]+)*"), "Clara seeks the old map and the golden boat"),
    "grammar": (StructuredOutputs(grammar='root ::= [a-z ]+ ("," [a-z ]+)*'), "the old map, the golden boat, the mill"),
}
BLOCK = 7
Walk = tuple[float, float, float, float]
"""Seconds to compile, of a mask, of a token taken, of a block taken back."""


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of this thread, and what the call gives."""
    started = time.thread_time()
    result = call()
    return time.thread_time() - started, result


def walked(
    compiled: float, fill: Callable[[], Any], take: Callable[[int], Any], back: Callable[[int], Any], ids: list[int]
) -> Walk:
    """Along the ids, and back."""
    masks, takes, backs = [], [], []
    for start in range(0, len(ids) - BLOCK, BLOCK):
        for repeat in (False, True):
            for token in ids[start : start + BLOCK]:
                masks.append(timed(fill)[0])
                took, accepted = timed(lambda token=token: take(token))  # type: ignore[misc]
                assert accepted
                takes.append(took)
            if not repeat:
                backs.append(timed(lambda: back(BLOCK))[0])
    return compiled, statistics.median(masks), statistics.median(takes), statistics.median(backs)


def ours(compiler: GrammarCompiler, form: StructuredOutputs, ids: list[int]) -> Walk:
    """The engine of this project."""
    compiled, matcher = timed(lambda: compiler._compiled_form(form).deep_copy())
    bits = allocate_token_bitmask(1, compiler.vocab_size + 1)
    return walked(
        compiled, lambda: fill_next_token_bitmask(matcher, bits), matcher.consume_token, matcher.rollback, ids
    )


def theirs(compiler: Any, form: StructuredOutputs, ids: list[int], size: int) -> Walk:
    """xgrammar."""
    if form.regex is not None:
        compiled, grammar = timed(lambda: compiler.compile_regex(form.regex))
    elif form.grammar is not None:
        compiled, grammar = timed(lambda: compiler.compile_grammar(form.grammar))
    else:
        schema = json.dumps(form.json or {"type": "object"})
        compiled, grammar = timed(lambda: compiler.compile_json_schema(schema))
    matcher, bits = xgrammar.GrammarMatcher(grammar), xgrammar.allocate_token_bitmask(1, size)
    return walked(compiled, lambda: matcher.fill_next_token_bitmask(bits), matcher.accept_token, matcher.rollback, ids)


def main() -> None:
    """Print a table: microseconds of ours, and how many times as long xgrammar takes."""
    with tempfile.TemporaryDirectory() as directory:
        save_tokenizer(gguf_file(), Path(directory))
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(directory)
    size = len(tokenizer)
    compiler = GrammarCompiler(tokenizer, size, [tokenizer.eos_token_id])
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    other = xgrammar.GrammarCompiler(info, max_threads=1)
    print("| form | compile | mask | token taken | block taken back |\n|---|---|---|---|---|")
    for name, (form, text) in FORMS.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        pairs = zip(ours(compiler, form, ids), theirs(other, form, ids, size), strict=True)
        cells = [f"{here * 1e6:.0f} us, x {there / here:.2f}" for here, there in pairs]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
