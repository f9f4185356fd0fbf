"""What changes the scores of single rows before temperature: one module per logits processor, listed in `chain`."""
