"""Tests of trio_llm.frontend."""
