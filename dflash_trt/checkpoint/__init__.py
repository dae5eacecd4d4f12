"""What is on disk: the configs and weights of targets and drafters, and whether two belong together."""
