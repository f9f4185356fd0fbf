"""Token ids to text: detokenizer, stop strings, log-probabilities. Pure."""
