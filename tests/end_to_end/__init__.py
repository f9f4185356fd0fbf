"""Tests with real processes, sockets and models."""
