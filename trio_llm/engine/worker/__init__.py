"""The model's memory on the device: step batches and the paged KV cache."""
