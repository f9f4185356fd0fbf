"""`python -m tests.end_to_end.fake_server ENGINE SERVER`: `trio-llm serve` with configurations given as JSON."""

from __future__ import annotations

import sys

import msgspec

from trio_llm.cli.serve import run_server
from trio_llm.config import EngineConfig, ServerConfig
from trio_llm.errors import TrioLLMError

if __name__ == "__main__":
    engine_json, server_json = sys.argv[1:]
    try:
        code = run_server(
            msgspec.json.decode(engine_json, type=EngineConfig),
            msgspec.json.decode(server_json, type=ServerConfig),
            log_level="info",
            log_stats=False,
        )
    except TrioLLMError as error:
        print(f"trio-llm: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)
