"""Measuring what was made: what a conversion cost in quality."""
