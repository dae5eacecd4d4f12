"""Checkpoints that come with the project, installed as `dflash_trt.examples`."""
