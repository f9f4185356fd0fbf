"""trio_llm: serve large language models from Trio."""
