"""The DFlash plugin for TensorRT, installed as `dflash_trt.plugins`: kernels, and their registration.

Each operation is a file: its torch reference, its Triton kernels, and how these are launched. Of `dflash_trt`, modules
here import errors only.
"""
