"""For tests of programs that use trio_llm."""
