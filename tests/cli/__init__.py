"""Tests of trio_llm.cli."""
