"""Commands that measure. Each prints one JSON object a line and case."""
