"""A program over an engine: prints its ranks' process ids and a greedy output, then does what it is told.

python -m tests.runtime.rank_program ENGINE_DIR [wait|fail]
"""

from __future__ import annotations

import json
import sys
import time

import psutil
import torch

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    llm = LLM(sys.argv[1], device="cpu")
    tokens = llm.generate([[5, 6, 7]], PARAMS)[0].outputs[0].token_ids
    print(json.dumps([[child.pid for child in psutil.Process().children()], tokens]), flush=True)
    if "fail" in sys.argv:
        raise ValueError("of the caller's own")
    if "wait" in sys.argv:
        time.sleep(60)
