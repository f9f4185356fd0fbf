"""Tests of what is generated for an HTTP request."""
