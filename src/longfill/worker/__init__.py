"""One rank: the pool's bytes, a step as tensors, the model, the sampler."""
