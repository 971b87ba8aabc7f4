"""Prometheus and Grafana: metrics that exist, files that exist, and Prometheus' own opinion where it is installed."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployments.serving import metrics
from tools.cluster_check.document import Document, Fault, Where, at, document, text_fault

_RULES = "cluster/monitoring/alerts.yaml"
_DASHBOARD = "cluster/monitoring/grafana-dashboard.json"
_NAME = re.compile(r"\bray_talkray_\w+")
_KEYS = {
    "": {"global", "rule_files", "scrape_configs", "alerting"},
    "group": {"name", "rules", "interval"},
    "rule": {"alert", "expr", "for", "labels", "annotations"},
    "scrape": {"job_name", "static_configs", "file_sd_configs", "authorization", "metrics_path", "scrape_interval"},
}


def exported() -> set[str]:
    """Every time series of ours, as Prometheus sees it."""
    return {
        f"ray_{instrument.name}{suffix}"
        for instrument in metrics.INSTRUMENTS
        for suffix in (["_bucket", "_count", "_sum"] if isinstance(instrument, metrics.Histogram) else [""])
    }


def check(root: Path) -> Iterator[Fault]:
    """Faults of rules, dashboard and both configurations of Prometheus."""
    yield from _rules(document(root / _RULES))
    yield from _dashboard(root / _DASHBOARD)
    for name in ("cluster/monitoring/prometheus.yaml", "cluster/compose/prometheus.yaml"):
        yield from _prometheus(root, document(root / name))
    yield from _promtool(root / _RULES)


def _expression(text: str) -> Iterator[str]:
    used = set(_NAME.findall(text))
    if not used:
        yield "no metric of ours"
    for name in sorted(used - exported()):
        yield f"there is no metric {name}"
    if any(name.endswith("_sum") for name in used):
        yield "a _sum is built from the middles of buckets: use quantiles"
    if text.count("(") != text.count(")"):
        yield "parentheses do not match"


def _unknown(found: Document, kind: str, where: Where) -> Iterator[Fault]:
    for key in at(found.data, where, {}).keys() - _KEYS[kind]:
        yield found.fault((*where, key), f"unknown key; known: {', '.join(sorted(_KEYS[kind]))}")


def _rules(rules: Document) -> Iterator[Fault]:
    for i, group in enumerate(at(rules.data, ("groups",), [])):
        yield from _unknown(rules, "group", ("groups", i))
        for j, rule in enumerate(group.get("rules", [])):
            where: Where = ("groups", i, "rules", j)
            yield from _unknown(rules, "rule", where)
            for message in _expression(str(rule.get("expr", ""))):
                yield rules.fault((*where, "expr"), message)


def _dashboard(file: Path) -> Iterator[Fault]:
    try:
        dashboard = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        yield Fault(file, error.lineno, f"no JSON: {error.msg}")
        return
    for panel in dashboard.get("panels", []):
        for target in panel.get("targets", []):
            expression = target.get("expr", "")
            for message in _expression(expression):
                yield text_fault(file, json.dumps(expression), f"{panel.get('title')}: {message}")


def _prometheus(root: Path, config: Document) -> Iterator[Fault]:
    yield from _unknown(config, "", ())
    for index, name in enumerate(at(config.data, ("rule_files",), [])):
        if not (root / "cluster/monitoring" / str(name)).is_file():
            yield config.fault(("rule_files", index), f"there is no cluster/monitoring/{name}")
    jobs: list[Any] = at(config.data, ("scrape_configs",), [])
    if not jobs:
        yield config.fault((), "scrapes nothing")
    for index in range(len(jobs)):
        yield from _unknown(config, "scrape", ("scrape_configs", index))


def _promtool(rules: Path) -> Iterator[Fault]:
    """Of expressions only Prometheus knows the grammar: `make metrics` fetches it."""
    if shutil.which("promtool") is None:
        return
    done = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True, check=False)
    if done.returncode:
        yield Fault(rules, 1, f"promtool: {' '.join(done.stderr.split())}")
