"""`dflash-trt run`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dflash_trt.models.pair import Pair
from dflash_trt.ops.base import Ops
from tests.cli.invoke import invoke
from tests.conftest import TINY, Engines

PROMPTS = (TINY / "prompts.txt").read_text().splitlines()[:2]


@pytest.fixture
def engine(llms: Engines) -> Path:
    return llms["tiny"].engine.path


def run_json(capsys: pytest.CaptureFixture[str], engine: Path, *options: object) -> dict[str, Any]:
    result = invoke(capsys, "run", "--engine_dir", engine, "--format", "json", "--device", "cpu", *options)
    assert result.status == 0, result.err
    content: dict[str, Any] = json.loads(result.out)
    return content


def test_json_is_the_documented_object(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    options = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--max_output_len", "48"]
    content = run_json(capsys, engine, *options, "--verify_window", "8")
    assert [output["prompt"] for output in content["outputs"]] == PROMPTS
    for output in content["outputs"]:
        assert output.keys() == {"prompt", "text", "token_ids", "finish_reason", "seed"}
        assert output["text"] and output["finish_reason"] in ("stop", "length")
    stats = content["stats"]
    assert stats["output_tokens"] == sum(len(output["token_ids"]) for output in content["outputs"])
    assert stats["acceptance_length"] > 2 and stats["accepted_tokens"] <= stats["draft_tokens"]

    plain = run_json(capsys, engine, *options, "--no_speculation")
    assert [o["token_ids"] for o in plain["outputs"]] == [o["token_ids"] for o in content["outputs"]]
    assert plain["stats"]["acceptance_length"] == 1.0 and plain["stats"]["draft_tokens"] == 0
    assert plain["stats"]["target_passes"] > stats["target_passes"]


@pytest.mark.parametrize("output_format", ["text", "json"])
def test_an_output_that_fails_is_told_after_the_others(
    capsys: pytest.CaptureFixture[str], llms: Engines, engine: Path, output_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of a prompt with one token are not finite."""
    first, second = ({*llms["tiny"].tokenizer.encode(prompt)} for prompt in PROMPTS)
    bad = min(second - first)
    target_pass = Pair.target_pass

    def overflowing(self: Pair, ops: Ops, tokens: Tensor, *where: Any) -> Tensor:
        logits: Tensor = target_pass(self, ops, tokens, *where)
        return logits.masked_fill((tokens == bad).any(1)[:, None, None], float("nan"))

    given = ["--max_output_len", "8", "--logit_bias", json.dumps({bad: -100}), "--device", "cpu", "--no_speculation"]
    alone = run_json(capsys, engine, "--prompt", PROMPTS[0], *given[:4], "--no_speculation")["outputs"][0]
    monkeypatch.setattr(Pair, "target_pass", overflowing)
    prompts = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]
    result = invoke(capsys, "run", "--engine_dir", engine, "--format", output_format, *prompts, *given)
    assert result.status == 2 and "prompt 1: the target's logits are not finite in float64" in result.err
    if output_format == "text":
        assert alone["text"] in result.out
        return
    sound, failed = json.loads(result.out)["outputs"]
    assert sound["token_ids"] == alone["token_ids"] and "error" not in sound
    assert failed["finish_reason"] == "error" and failed["token_ids"] == []
    assert failed["error"].startswith("the target's logits are not finite in float64")


def test_sampling_options_reach_the_sampler(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    base = ["--prompt", PROMPTS[0], "--max_output_len", "32"]
    sampled = [*base, "--temperature", "1.2", "--seed", "3"]

    def ids(*options: object) -> list[int]:
        token_ids: list[int] = run_json(capsys, engine, *options)["outputs"][0]["token_ids"]
        return token_ids

    longer = ["--prompt", PROMPTS[0], "--max_output_len", "120", "--ignore_eos"]
    greedy = ids(*base)
    assert ids(*sampled) == ids(*sampled) != greedy
    for option in (["--top_k", "1"], ["--top_p", "0.01"], ["--min_p", "1.0"]):
        assert ids(*sampled, *option) == greedy
    for option in (["--repetition_penalty", "2.0"], ["--frequency_penalty", "2"], ["--presence_penalty", "2"]):
        assert ids(*longer, *option) != ids(*longer)
    assert len(run_json(capsys, engine, *sampled, "--n", "3")["outputs"]) == 3
    assert len(ids(*longer)) == 120
    assert ids(*base, "--raw_prompt") != greedy
    assert ids(*sampled, "--verify_window", "3") == ids(*sampled)


def test_stop_option(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    whole = run_json(capsys, engine, "--prompt", PROMPTS[0])["outputs"][0]["text"]
    stop = whole[10:13]
    cut = run_json(capsys, engine, "--prompt", PROMPTS[0], "--stop", stop)["outputs"][0]
    assert cut["text"] == whole[: whole.index(stop)] and cut["finish_reason"] == "stop"


def test_text_goes_to_stdout_and_statistics_to_stderr(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    result = invoke(capsys, "run", "--engine_dir", engine, "--prompt", PROMPTS[0], "--max_output_len", "20")
    text = run_json(capsys, engine, "--prompt", PROMPTS[0], "--max_output_len", "20")["outputs"][0]["text"]
    assert result.status == 0
    assert result.out == f"> {PROMPTS[0]}\n{text}\n\n"
    assert "acceptance length" in result.err and "tokens/s" in result.err


def test_chat_template_arguments(capsys: pytest.CaptureFixture[str], engine: Path, tmp_path: Path) -> None:
    """They reach the template; the same text as a raw prompt gives the same tokens."""
    shutil.copytree(engine, tmp_path / "engine")
    (tmp_path / "engine/chat_template.jinja").write_text("{{ mood | default('plain') }}: {{ messages[0].content }}")
    options = ["--max_output_len", "12"]
    for arguments, text in (([], "plain: hi"), (["--chat_template_kwargs", '{"mood": "glad"}'], "glad: hi")):
        templated = run_json(capsys, tmp_path / "engine", "--prompt", "hi", *options, *arguments)
        raw = run_json(capsys, tmp_path / "engine", "--prompt", text, "--raw_prompt", *options)
        assert templated["outputs"][0]["token_ids"] == raw["outputs"][0]["token_ids"]


def test_what_may_be_chosen(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    base = ["--prompt", PROMPTS[0], "--max_output_len", "12"]
    greedy = run_json(capsys, engine, *base)["outputs"][0]["token_ids"]
    banned = run_json(capsys, engine, *base, "--logit_bias", json.dumps({str(greedy[3]): -100}))["outputs"][0]
    assert banned["token_ids"][:3] == greedy[:3] and greedy[3] not in banned["token_ids"]
    ends = ["--logit_bias", '{"0": 100}']
    assert len(run_json(capsys, engine, *base, *ends)["outputs"][0]["token_ids"]) == 1
    assert len(run_json(capsys, engine, *base, *ends, "--min_tokens", "5")["outputs"][0]["token_ids"]) == 6


def test_log_probabilities(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    output = run_json(capsys, engine, "--prompt", PROMPTS[0], "--max_output_len", "12", "--logprobs", "2")["outputs"][0]
    assert len(output["logprobs"]) == len(output["token_ids"])
    for token, found in zip(output["token_ids"], output["logprobs"], strict=True):
        assert found.keys() == {"logprob", "top"} and len(found["top"]) == 2
        assert found["top"][0] == {"token_id": token, "logprob": found["logprob"]}, "greedy takes the likeliest"
        assert 0 >= found["top"][0]["logprob"] >= found["top"][1]["logprob"]


def test_forms(capsys: pytest.CaptureFixture[str], engine: Path, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "form.ebnf"
    schema.write_text('{"enum": ["mill", "market"]}')
    grammar.write_text('root ::= "(" root ")" | "x"')
    for options, pattern in (
        (["--json_schema", schema.read_text()], '"(mill|market)"'),
        (["--json_schema", f"@{schema}"], '"(mill|market)"'),
        (["--regex", "[a-f]{3,5}!"], "[a-f]{3,5}!"),
        (["--grammar", str(grammar)], r"\(*x\)*"),
    ):
        options = ["--prompt", PROMPTS[0], "--max_output_len", "60", "--temperature", "1", "--seed", "3", *options]
        output = run_json(capsys, engine, *options)["outputs"][0]
        assert re.fullmatch(pattern, output["text"]), output["text"]
        assert output["finish_reason"] == "stop"
