"""Tests of trio_llm.engine."""
