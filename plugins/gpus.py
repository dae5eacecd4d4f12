"""The GPUs that kernels are compiled for, by compute capability."""

from __future__ import annotations

SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""KiB that a thread block may have (CUDA C++ Programming Guide, technical specifications per compute capability)."""

AHEAD_OF_TIME_SHARED = 49152
"""Bytes that a thread block may have where nobody asks the driver for more, and TensorRT is not known to ask."""

# NVIDIA's white papers of the A100, the GA102, Ada, the H100 and RTX Blackwell; of the B200 what it reports, 74 on
# each die.
MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 148, 120: 188}
"""Of the largest GPU that is sold: A100, A40, L40S, H100 and H200, B200, B300, RTX PRO 6000. On a smaller one of the
same compute capability an engine splits keys finer than it needs to."""
