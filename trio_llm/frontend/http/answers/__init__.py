"""Answers of any protocol: what is generated for an HTTP request, as typed events. Knows no wire format."""
