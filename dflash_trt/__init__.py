"""DFlash speculative decoding for NVIDIA GPUs: convert, build, check and serve."""

__version__ = "0.1.0"
