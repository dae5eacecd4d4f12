"""Packaging of dflash-trt; exact versions are pinned in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "dflash_trt/__init__.py").read_text()).group(1)

setup(
    name="dflash-trt",
    version=VERSION,
    description="Lossless DFlash speculative decoding: build an engine from a target and its drafter, check it, run it",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=[*find_packages(include=["dflash_trt", "dflash_trt.*"]), "dflash_trt.examples", "dflash_trt.plugins"],
    package_dir={"dflash_trt.examples": "examples", "dflash_trt.plugins": "plugins"},
    package_data={
        "dflash_trt.serving": ["page.html"],
        "dflash_trt.examples": ["smollm2-135m/drafter/*", "smollm2-135m/*.jsonl", "tiny/target/*", "tiny/drafter/*"],
    },
    install_requires=[
        "torch>=2.9",
        "transformers>=5.0",
        "safetensors>=0.5",
        "gguf>=0.17",
        "numpy>=2.0",
        # Kernels for CPUs.
        "llvmlite>=0.47",
        "click>=8.1",
        "rich>=13",
        "pydantic>=2.9",
        "jinja2>=3.1",
        "llguidance>=1.9",
        "jsonschema_rs>=0.58",
        "fastapi>=0.130",
        "uvicorn>=0.35",
        "prometheus_client>=0.22",
    ],
    extras_require={
        "cpu": ["torch==2.13.0"],
        "rtx": ["tensorrt-rtx-cu13==1.7.1.116"],
        # Kernels of our plugin; torch for CUDA brings it, torch for CPUs does not.
        "plugins": ["triton>=3.6"],
        # ModelOpt 0.47 imports requests without declaring it.
        "benchmarks": ["matplotlib>=3.9", "scipy>=1.13"],
        "quantize": ["nvidia-modelopt==0.47.0", "requests"],
        "test": [
            "pytest>=8",
            "pytest-xdist>=3",
            "hypothesis>=6.100",
            "ml_dtypes>=0.5",
            "scipy>=1.13",
            "psutil>=6",
            "httpx>=0.28",
            "openai>=2",
            "pydantic-ai-slim[openai]>=1",
            "playwright>=1.50",
            "schemathesis>=4.10",
            "ruff",
            "mypy",
        ],
    },
    entry_points={"console_scripts": ["dflash-trt = dflash_trt.cli.main:main"]},
)
