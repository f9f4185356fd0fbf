"""`python -m trio_llm.engine`: the engine process. Started by the front end, never by hand."""

from trio_llm.engine.process import main

main()
