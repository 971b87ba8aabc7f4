"""`promtool test rules`: each alert fires in an evil hour, with its runbook, and none does in a quiet one."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "cluster" / "monitoring" / "alerts.yaml"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]
]
ALARMS = [rule for rule in RULES if "alert" in rule]
NAMES = list(dict.fromkeys(rule["alert"] for rule in ALARMS))
# A series a minute, for 90 minutes: in a quiet hour, and in an evil one, in which the others are as in the quiet one.
QUIET = {
    'talkray_ttfp_seconds_bucket{model="voices",le="0.5"}': "0+600x90",
    'talkray_ttfp_seconds_count{model="voices"}': "0+600x90",
    'talkray_stall_seconds_bucket{model="voices",le="0.1"}': "0+598x90",
    'talkray_stall_seconds_count{model="voices"}': "0+600x90", 'talkray_ingress_used_ratio{model=""}': "0.5x90",
    'talkray_refusals_total{reason="line",model="voices"}': "0x90",
    'talkray_refusals_total{reason="invalid_api_key",model=""}': "0+600x90",
    'talkray_underruns_total{model="voices"}': "0+6x90",
    'talkray_chunk_lateness_seconds_count{model="voices"}': "0+6000x90",
    'talkray_ttfb_seconds_bucket{le="1.0"}': "0+600x90", 'talkray_ttfb_seconds_bucket{le="2.0"}': "0+600x90",
    'talkray_ttfb_seconds_bucket{le="+Inf"}': "0+600x90",
    'talkray_replicas_wanted{pool="talker",model="voices"}': "2x90",
    'talkray_replicas_running{pool="talker",model="voices"}': "2x90",
    'talkray_kv_blocks_used_ratio{model="voices"}': "0.6x90",
    'talkray_failovers_total{reason="TalkerLost",model=""}': "0x90",
    'talkray_replicas_died{pool="talker",model="voices"}': "1x90",
}  # fmt: skip
EVIL = {
    'talkray_ttfp_seconds_bucket{model="voices",le="0.5"}': "0+300x90",
    'talkray_stall_seconds_bucket{model="voices",le="0.1"}': "0+450x90",
    'talkray_ingress_used_ratio{model=""}': "0.5x10 0.9x80",
    'talkray_refusals_total{reason="line",model="voices"}': "0x10 0+6000x80",
    'talkray_underruns_total{model="voices"}': "0+600x90",
    'talkray_ttfb_seconds_bucket{le="1.0"}': "0+60x90",
    'talkray_replicas_running{pool="talker",model="voices"}': "2x10 0x80",
    'talkray_kv_blocks_used_ratio{model="voices"}': "0.6x10 0.99x80",
    'talkray_failovers_total{reason="TalkerLost",model=""}': "0x10 0+1x80",
    'talkray_replicas_died{pool="talker",model="voices"}': "1x75 2x15",
}
VOICES, TALKERS = {"model": "voices"}, {"pool": "talker", "model": "voices"}
# Labels of each alert in the evil hour, and what `$value` is in its summary.
FIRING: dict[str, tuple[dict[str, str], str]] = {
    "TalkrayFirstAudioLate": (VOICES, "50%"), "TalkrayListenersPaused": (VOICES, "25%"),
    "TalkrayIngressNearlyFull": ({}, ""), "TalkrayRefusing": ({"reason": "line", **VOICES}, ""),
    "TalkrayUnderruns": (VOICES, ""), "TalkrayFirstByteSlow": ({}, ""), "TalkrayRefusingMost": (VOICES, ""),
    "TalkrayPoolDown": (TALKERS, ""), "TalkrayReplicasMissing": (TALKERS, ""),
    "TalkrayKvCacheFull": (VOICES, ""), "TalkrayFailovers": ({}, ""), "TalkrayReplicasDie": (TALKERS, "1"),
    "TalkrayNoMetrics": ({}, ""),
}  # fmt: skip


def expected(rule: dict[str, Any]) -> dict[str, Any]:
    labels, value = FIRING[rule["alert"]]

    def told(text: str) -> str:
        text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels.get(match[1], ""), text)
        model = f" (model {labels['model']})" if "model" in labels else ""
        text = re.sub(r"\{\{ with \$labels\.model \}\}.*?\{\{ end \}\}", model, text)
        return re.sub(r"\{\{ \$value.*?\}\}", value, text)

    annotations = {name: told(text) for name, text in rule["annotations"].items()}
    return {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": annotations}


def promtool_says(binaries: Path, folder: Path, values: dict[str, str], alerts: list[dict[str, Any]]) -> str:
    """Its complaints about alerts in the 80th of 90 minutes."""
    series = [{"series": f"ray_{name}", "values": each} for name, each in values.items()]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": alerts}
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([binaries / "promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == ("SUCCESS" in done.stdout), done.stderr
    return "" if done.returncode == 0 else done.stdout + done.stderr


def every(name: str) -> list[dict[str, Any]]:
    return [expected(rule) for rule in ALARMS if rule["alert"] == name]


def asked(name: str, alerts: list[dict[str, Any]], at: str = "80m") -> dict[str, Any]:
    return {"eval_time": at, "alertname": name, "exp_alerts": alerts}


def test_no_alert_fires_in_a_quiet_hour(prometheus_bin: Path, tmp_path: Path) -> None:
    assert promtool_says(prometheus_bin, tmp_path, QUIET, [asked(name, []) for name in NAMES]) == ""


def test_every_alert_fires_in_an_evil_hour_and_names_its_runbook(prometheus_bin: Path, tmp_path: Path) -> None:
    assert list(FIRING) == NAMES
    *alerts, no_metrics = [asked(name, every(name)) for name in NAMES]
    assert promtool_says(prometheus_bin, tmp_path, QUIET | EVIL, alerts) == ""
    assert promtool_says(prometheus_bin, tmp_path, {"node_cpus": "8x90"}, [no_metrics]) == ""


def test_promtool_would_complain(prometheus_bin: Path, tmp_path: Path) -> None:
    assert "TalkrayRefusing" in promtool_says(prometheus_bin, tmp_path, QUIET | EVIL, [asked("TalkrayRefusing", [])])


@pytest.mark.parametrize(("name", "before", "after"), [("TalkrayReplicasMissing", "18m", "23m")])
def test_a_short_moment_is_no_alarm(prometheus_bin: Path, tmp_path: Path, name: str, before: str, after: str) -> None:
    alerts = [asked(name, [], before), asked(name, every(name), after)]
    assert promtool_says(prometheus_bin, tmp_path, QUIET | EVIL, alerts) == ""


def test_eight_times_the_objective_is_a_warning(prometheus_bin: Path, tmp_path: Path) -> None:
    [[_, slow]] = [[rule for rule in ALARMS if rule["alert"] == "TalkrayListenersPaused"]]
    alert = expected(slow)
    alert["exp_annotations"]["summary"] = alert["exp_annotations"]["summary"].replace("25%", "8%")
    bad = QUIET | {'talkray_stall_seconds_bucket{model="voices",le="0.1"}': "0+552x90"}
    assert promtool_says(prometheus_bin, tmp_path, bad, [asked("TalkrayListenersPaused", [alert])]) == ""
