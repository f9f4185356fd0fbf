"""A step on the device: its numbers and their upload, the forward pass, the KV cache, weights, vectors."""
