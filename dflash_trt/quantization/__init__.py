"""Four- and eight-bit floats: the formats of quantized checkpoints, to the bit."""
