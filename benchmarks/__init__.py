"""Commands that measure; each prints one JSON object a line."""
