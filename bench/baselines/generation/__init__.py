"""Sides of the generation benchmarks: our engine, transformers, vLLM, SGLang."""
