"""The OpenAI API over an engine in a process of its own."""
