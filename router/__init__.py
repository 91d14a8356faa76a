"""Decisions and the splice of two token streams. Pure Python: no torch, no Ray, no vLLM."""
