"""check_exposition: what the text format for Prometheus demands and its own parser does not check."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["check_exposition"]

_SUFFIXES: Final = {
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("", "_sum", "_count"),
    "counter": ("",),
    "gauge": ("",),
}
_LABEL: Final = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\.)*"'
_SAMPLE: Final = re.compile(rf"([a-zA-Z_:][\w:]*)(?:\{{((?:{_LABEL})(?:,{_LABEL})*)?\}})? (\S+)")


def check_exposition(text: str) -> None:
    """Assert that each family has one HELP and one TYPE in front of all its samples, which stand together, that no
    sample comes twice, and that buckets are cumulative and end with the count."""
    assert text.endswith("\n")
    families: dict[str, str] = {}
    helped: list[str] = []
    seen: set[tuple[str, str]] = set()
    buckets: dict[tuple[str, str], list[float]] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, documentation = line.removeprefix("# HELP ").partition(" ")
            assert documentation.strip(), f"{name} says nothing"
            assert name not in helped, f"{name} has two HELP lines"
            helped.append(name)
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert helped[-1] == name, f"{name} has no HELP line before its TYPE"
            assert name not in families, f"{name} has two TYPE lines"
            families[name], current = kind, name
            continue
        match = _SAMPLE.fullmatch(line)
        assert match, f"not a sample: {line!r}"
        name, labels, value = match[1], match[2] or "", float(match[3])
        kind = families[current]
        assert name in {current + suffix for suffix in _SUFFIXES[kind]}, f"{name} stands among those of {current}"
        assert (name, labels) not in seen, f"{name}{{{labels}}} comes twice"
        seen.add((name, labels))
        if name.endswith("_bucket") and kind == "histogram":
            others = ",".join(label for label in labels.split(",") if not label.startswith("le="))
            buckets.setdefault((current, others), []).append(value)
        if name.endswith("_count") and kind == "histogram":
            values = buckets[current, labels]
            assert values == sorted(values), f"the buckets of {current} are not cumulative"
            assert values[-1] == value, f"the last bucket of {current} is not its count"
