"""The step loop and its offline front, `LLM`."""
