"""Models: config.json to layers, strict loading, and the forward pass."""
