"""Logits processors: they change the scores of single rows before temperature. `chain` lists them."""
