"""Alert rules and dashboard name only metrics that exist."""

import json
import re
from pathlib import Path

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


def rules() -> list[dict[str, str]]:
    document = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def queries() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("expression", [*(rule["expr"] for rule in rules()), *queries()])
def test_an_expression_uses_metrics_that_exist(expression: str) -> None:
    used = set(re.findall(r"\bray_talkray_\w+", expression))
    assert used
    assert used <= EXPORTED
    assert not any(name.endswith("_sum") for name in used), "built from the middles of buckets: use quantiles"


def test_the_dashboard_shows_every_metric() -> None:
    shown = " ".join(queries())
    named = {
        name for name in INSTRUMENTS if name.startswith("talkray_usage_")
    }  # after keys: for those who may know them
    hidden = {name for name in INSTRUMENTS if name not in shown} - named
    assert hidden == {"talkray_ingress_used_ratio", "talkray_failover_gap_seconds"}
