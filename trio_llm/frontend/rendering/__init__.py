"""Text and chat messages to token ids."""
