"""A server whose draft tokens come from prompt lookup answers what one without speculation would."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from tests.conftest import Engines
from tests.serving.running_server import DIARY, running


def test_ngram_over_http(llms: Engines, alone: LLM) -> None:
    prompts = [f"{DIARY} {DIARY} " + DIARY[:length] for length in (10, 20, 30, 40)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = [each.outputs[0].text for each in alone.generate(prompts, params, verify_window=1)]
    with (
        LLM(llms["tiny"].engine.path, device="cpu", proposer="ngram") as llm,
        running(llm) as server,
        ThreadPoolExecutor() as pool,
    ):
        body = {"max_tokens": 40, "ignore_eos": True, "temperature": 0, "verify_window": 8}
        answers = list(pool.map(lambda prompt: server.post("/v1/completions", prompt=prompt, **body).json(), prompts))
        metrics = server.http.get("/metrics").text
    assert [answer["choices"][0]["text"] for answer in answers] == expected
    [drafted] = [
        line for line in metrics.splitlines() if line.startswith("dflash_trt:spec_decode_num_draft_tokens_total")
    ]
    assert float(drafted.rpartition(" ")[2]) > 0
