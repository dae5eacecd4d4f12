"""Checkpoints become quantized checkpoints."""
