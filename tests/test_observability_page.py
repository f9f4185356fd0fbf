"""docs/observability.md and the code say the same about series, times and stat loggers; the dashboard asks for series
that are there."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from tests.support.strict_metrics import check_exposition
from trio_llm.errors import OverloadedError
from trio_llm.frontend.statistics.metric_counts import MetricsSnapshot
from trio_llm.frontend.statistics.metric_families import make_families
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.outputs import RequestMetrics
from trio_llm.testing.fake_llm import open_fake_llm
from trio_llm.testing.server import open_test_server

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = (ROOT / "docs" / "observability.md").read_text()
DASHBOARD: Final[dict[str, Any]] = json.loads((ROOT / "examples" / "grafana" / "dashboard.json").read_text())


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


async def scrape_after_one_request_of_each_kind() -> dict[str, str]:
    """What /metrics shows then, in both formats, by content type."""
    metrics = PrometheusStatLogger("fake")
    async with (
        open_fake_llm(answer="Hello", stat_loggers=[metrics], max_num_queued_reqs=2) as llm,
        open_test_server(llm, metrics=metrics) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {**chat, "stream": True}),
            ("/v1/completions", {"prompt": "Once", "n": 2, "temperature": 1}),
            ("/v1/embeddings", {"input": "Once"}),
            ("/score", {"text_1": "Once", "text_2": "Twice"}),
        ):
            assert (await client.post(path, json=body)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/nowhere")).status_code == 404
        async with llm.generate("left early"):
            with pytest.raises(OverloadedError):
                await llm.complete("too much", n=2, temperature=1)
        await llm.sleep()
        await llm.wake_up()
        await llm.assert_idle()
        plain = await client.get("/metrics")
        openmetrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    return {"plain": plain.text, "openmetrics": openmetrics.text}


@pytest.fixture(scope="module")
def scraped() -> dict[str, str]:
    import trio

    return trio.run(scrape_after_one_request_of_each_kind)


# ------------------------------------------------------------------------------------------ series


def of_the_page(family: Metric) -> str:
    """The row of a family."""
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = {label: None for sample in family.samples for label in sample.labels if label not in ("le", "quantile")}
    return f"| `{name}` | {family.type} | {', '.join(f'`{label}`' for label in labels)} | {family.documentation} |"


def own_families(text: str) -> Iterator[Metric]:
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(("process_", "python_")):
            yield family


def test_the_table_of_series_is_made_from_the_metrics(scraped: dict[str, str]) -> None:
    rows = "\n".join(sorted(of_the_page(family) for family in own_families(scraped["plain"])))

    table = section("Metrics").split("|---|---|---|---|\n")[1].split("\n\n")[0]
    assert table == rows, f"put this into docs/observability.md:\n{rows}"


def test_a_strict_reader_accepts_both_formats(scraped: dict[str, str]) -> None:
    check_exposition(scraped["plain"])
    families: list[Metric] = list(parse_open_metrics(scraped["openmetrics"]))  # type: ignore[no-untyped-call]
    names = [family.name for family in families]

    assert len(names) == len(set(names))
    assert "vllm:generation_tokens" in names
    assert all(sample.name.startswith(family.name) for family in families for sample in family.samples)


def test_series_are_the_same_before_and_after_requests(scraped: dict[str, str]) -> None:
    before = {family.name for family in make_families(MetricsSnapshot("m"))}

    assert before == {family.name for family in own_families(scraped["plain"])}


# --------------------------------------------------------------------------------------- dashboard


def expressions() -> list[tuple[str, str]]:
    """(title, query) of each panel's targets, and of the variables."""
    found = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
    variables = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    return found + [(one["name"], one["query"]["query"]) for one in variables]


SERIES: Final = re.compile(r"\b((?:vllm:|trio_llm[:_]|http_)\w+)(?:\{([^}]*)\})?")


@pytest.mark.parametrize(("title", "query"), expressions())
def test_each_query_of_the_dashboard_finds_samples(title: str, query: str, scraped: dict[str, str]) -> None:
    samples = [sample for family in own_families(scraped["plain"]) for sample in family.samples]
    asked = SERIES.findall(query)

    assert asked, query
    for name, matchers in asked:
        labels = [sample.labels for sample in samples if sample.name == name]
        assert labels, f"{name} has no sample"
        for label in re.findall(r"(\w+)=~?", matchers):
            assert all(label in one for one in labels), f"{name} has no label {label}"
    shown = {sample.name for sample in samples} & {name for name, _ in asked}
    grouped = [label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")]
    for label in grouped:
        assert any(label in sample.labels for sample in samples if sample.name in shown), f"nothing has {label}"


def test_histograms_of_the_dashboard_have_values_after_one_request_of_each_kind(scraped: dict[str, str]) -> None:
    named = {name for _, query in expressions() for name, _ in SERIES.findall(query) if name.endswith("_bucket")}
    counts = {
        sample.name: sample.value
        for family in own_families(scraped["plain"])
        for sample in family.samples
        if sample.name.endswith("_count")
    }

    assert len(named) >= 9
    assert [name for name in named if not counts[name.removesuffix("_bucket") + "_count"]] == []


def test_the_panels_do_not_overlap_and_have_the_variables_data_source() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & covered, panel["title"]
        cells |= covered
        assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}"
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["DS_PROMETHEUS", "model_name"]


# ------------------------------------------------------------------------------- times and loggers


def test_the_times_of_the_page_are_the_fields_of_the_code() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", section("Times of a request"), re.MULTILINE)

    assert listed == list(RequestMetrics.__struct_fields__)


async def test_the_stat_logger_of_the_page_works(tmp_path: Path) -> None:
    code = section("Stat loggers").split("```python\n")[1].split("```")[0]
    (tmp_path / "slow_requests.py").write_text(code)
    spec = importlib.util.spec_from_file_location("slow_requests", tmp_path / "slow_requests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.pop("slow_requests", None)
    spec.loader.exec_module(module)
    logger = module.SlowRequests()

    async with open_fake_llm(answer="Hi", stat_loggers=[logger]) as llm:
        await llm.complete("Quick")

    assert logger.slow == []
