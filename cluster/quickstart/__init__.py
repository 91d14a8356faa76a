"""A real small and large language model, and text to fit and score a mapper on, for a laptop.

It knows nothing of Serve, vLLM or the mapper: it hands out model folders and strings.
"""
