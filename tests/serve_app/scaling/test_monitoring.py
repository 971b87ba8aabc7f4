"""Alert rules and dashboard name only metrics that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.serving import metrics

FOLDER = Path(__file__).parents[3] / "cluster" / "monitoring"
INSTRUMENTS = {instrument.name: instrument for instrument in metrics.INSTRUMENTS}
EXPORTED = {
    f"ray_{name}{suffix}"
    for name, instrument in INSTRUMENTS.items()
    for suffix in (["_bucket", "_count", "_sum"] if instrument.boundaries else [""])
}


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def queries() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


RECORDED = {rule["record"] for rule in rules() if "record" in rule}


@pytest.mark.parametrize("expression", [*(rule["expr"] for rule in rules()), *queries()])
def test_an_expression_uses_metrics_that_exist(expression: str) -> None:
    used = set(re.findall(r"\bray_talkray_\w+|\btalkray:[\w:]+", expression))
    assert used
    assert used <= EXPORTED | RECORDED
    assert not any(name.endswith("_sum") for name in used), "built from the middles of buckets: use quantiles"


@pytest.mark.parametrize("rule", [rule for rule in rules() if "alert" in rule], ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do_and_names_its_entry_of_the_runbook(rule: dict[str, Any]) -> None:
    told = rule["annotations"]
    assert told["summary"]
    assert told["action"]
    page, _, anchor = told["runbook_url"].removeprefix("https://REPOSITORY/").partition("#")
    assert anchor == rule["alert"].lower()
    headings = re.findall(r"^#### (\w+)$", (FOLDER.parents[1] / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert rule["alert"] in headings


@pytest.mark.parametrize("metric", ["ttfp", "stall"])
def test_objectives_stand_at_boundaries_of_buckets(metric: str) -> None:
    [instrument] = [each for name, each in INSTRUMENTS.items() if name == f"talkray_{metric}_seconds"]
    said = " ".join([*(rule["expr"] for rule in rules()), *queries()])
    bounds = set(re.findall(rf'ray_talkray_{metric}_seconds_bucket{{le="([\d.]+)"}}', said))
    assert bounds
    assert bounds <= {str(bound) for bound in instrument.boundaries}


def test_the_dashboard_shows_every_metric() -> None:
    shown = " ".join(queries())
    named = {
        name for name in INSTRUMENTS if name.startswith("talkray_usage_")
    }  # after keys: for those who may know them
    hidden = {name for name in INSTRUMENTS if name not in shown} - named
    assert hidden == {"talkray_ingress_used_ratio", "talkray_failover_gap_seconds"}
