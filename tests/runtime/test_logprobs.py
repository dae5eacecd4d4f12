"""Log-probabilities are those of transformers' model, whatever parameters, drafts and neighbours there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_trt.runtime.sampling import SamplingParams
from tests.closeness import last_places
from tests.conftest import Engines

PROMPTS = [[5, 6, 7], [40] * 20, [9, 80, 3, 3, 17]]
PARAMS = [
    SamplingParams(logprobs=5),
    SamplingParams(logprobs=20, temperature=1.7, top_p=0.9, seed=4),
    SamplingParams(logprobs=0, temperature=0.8, repetition_penalty=1.3, logit_bias={8: 6.0, 30: -100.0}, seed=5),
]


@pytest.mark.parametrize("window", [1, 4])
def test_they_are_the_models_own(llms: Engines, window: int) -> None:
    llm = llms["llama"]
    model = AutoModelForCausalLM.from_pretrained(llms.root / "llama/target").double()
    params = [replace(each, max_tokens=16, ignore_eos=True) for each in PARAMS]
    for prompt, asked, output in zip(PROMPTS, params, llm.generate(PROMPTS, params, verify_window=window), strict=True):
        (completion,) = output.outputs
        tokens = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            rows = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        # Within what transformers rounds: its norms are float32 whatever the model is.
        assert completion.logprobs is not None
        for row, token, found in zip(rows, completion.token_ids, completion.logprobs, strict=True):
            assert found.logprob == pytest.approx(row[token].item(), abs=last_places(32)["atol"])
            best = row.topk(asked.logprobs or 0)
            assert [each for each, _ in found.top] == best.indices.tolist()
            assert [each for _, each in found.top] == pytest.approx(best.values.tolist(), abs=last_places(32)["atol"])


def test_there_are_none_unless_asked(llms: Engines) -> None:
    params = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, logprobs=1)]
    without, asked = llms["llama"].generate(PROMPTS[:2], params)
    assert without.outputs[0].logprobs is None
    assert asked.outputs[0].logprobs is not None and len(asked.outputs[0].logprobs) == len(asked.outputs[0].token_ids)
