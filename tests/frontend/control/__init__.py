"""Tests of trio_llm.wire."""
