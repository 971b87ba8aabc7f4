"""`make cluster-check` refuses what would fail, or do harm, on a cluster: each mistake by its file and line."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.cluster_check import flavours, hosts, kubernetes, machines, monitoring, serve, timeouts
from tools.cluster_check.__main__ import CHECKS, Check, faults, main
from tools.cluster_check.document import Fault

ROOT = Path(__file__).parents[2]
READ = (
    "cluster",
    "serve_app/cli/one-gpu.yaml",
    "serve_app/cli/ray_settings.py",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
)
READ += ("LICENSE",)
PRODUCTION = "cluster/serve/production.yaml"
LARGE = "cluster/kuberay/overlays/large"
SMALL = "cluster/kuberay/overlays/small"
BASE = "cluster/kuberay/base"
AWS, GCP = "cluster/aws.yaml", "cluster/gcp.yaml"
COMPOSE, UNIT, DOCKERFILE = "cluster/compose/compose.yaml", "cluster/talkray.service", "cluster/Dockerfile"
ALERTS = "cluster/monitoring/alerts.yaml"


@dataclass(frozen=True, slots=True)
class Mistake:
    """`right` becomes `wrong` where it first stands; the fault is at the line that begins with `at`."""

    check: Check
    file: str
    right: str
    wrong: str
    says: str
    at: str | None = None

    def __str__(self) -> str:
        return f"{self.file}-{self.wrong.strip().splitlines()[0] if self.wrong.strip() else self.right.strip()}"


MISTAKES = [
    Mistake(serve.check, PRODUCTION, "max_queued_requests: 64", "max_queue: 64", "Extra inputs"),
    Mistake(serve.check, PRODUCTION, "proxy_location:", "proxy_locations:", "no such key"),
    Mistake(serve.check, PRODUCTION, "  port: 8000", "  prot: 8000", "no such key"),
    Mistake(serve.check, PRODUCTION, "app:build_app", "app:build_ap", "cannot be imported"),
    Mistake(
        serve.check,
        PRODUCTION,
        "keys_file: /etc/talkray/keys.json",
        "allowed_hosts: [a]",
        "talkray key create",
        "host:",
    ),
    Mistake(serve.check, PRODUCTION, "        replicas: 16\n", "        replicas: 500\n", "not within 8 to 256"),
    Mistake(serve.check, PRODUCTION, "min_replicas: 8", "min_replicas: 800", "min_replicas <=", "codec_scaling:"),
    Mistake(serve.check, PRODUCTION, "  port: 8000\n", "  port: 8000\n  port: 8001\n", "twice", "port: 8001"),
    Mistake(serve.check, PRODUCTION, "  port: 8000", "  port: [8000", "no YAML", "  keep_alive"),
    Mistake(serve.check, f"{LARGE}/serve.yaml", "max_streams: 400", "max_streams: 300", "copy of"),
    Mistake(machines.check, AWS, "idle_timeout_minutes:", "idle_timeout_minute:", "unknown key"),
    Mistake(machines.check, AWS, "InstanceType:", "InstanceTyp:", "unknown field"),
    Mistake(machines.check, AWS, "c7i.4xlarge", "c7i.4xlarg", "EC2 has no"),
    Mistake(machines.check, AWS, "VolumeSize: 120", "VolumeSize: large", "invalid type", "Ebs:"),
    Mistake(machines.check, AWS, "availability_zone:", "availabilty_zone:", "reads no such key"),
    Mistake(machines.check, AWS, "min_workers: 2", "min_workers: 40", "more than max_workers"),
    Mistake(machines.check, AWS, "serve_app.nodes.aws.Nodes", "serve_app.nodes.aws.Node", "cannot be imported"),
    Mistake(machines.check, AWS, "min_workers: 0", "min_workers: 1", "a floor on spot"),
    Mistake(machines.check, AWS, "cache_stopped_nodes: false", "cache_stopped_nodes: true", "is to be false"),
    Mistake(machines.check, AWS, "{CPU: 0}", "{CPU: 4}", "no slots"),
    Mistake(machines.check, AWS, "{CPU: 8, GPU: 1}", "{CPU: 8.5, GPU: 1}", "8.5 is not"),
    Mistake(machines.check, AWS, "market: on-demand}", "market: spot}", "node_config says not spot"),
    Mistake(machines.check, AWS, "HttpTokens: required", "HttpTokens: optional", "HttpTokens"),
    Mistake(
        machines.check, AWS, "SecurityGroupIds:", "Monitoring: {Enabled: true} #", "port 22 is open", "node_config:"
    ),
    Mistake(machines.check, AWS, "RAY_AUTH_MODE=token", "RAY_AUTH_MODE=none", "lacks RAY_AUTH_MODE", "run_options:"),
    Mistake(machines.check, AWS, "--disable-usage-stats", "--disable-usage-stat", "no option", "- >-\n    ulimit"),
    Mistake(machines.check, AWS, 'eval "$(talkray env)";', "", "lacks eval", "- >-\n    ulimit"),
    Mistake(machines.check, GCP, "provisioningModel: SPOT", "provisioningModel: SPOTT", "none of", "scheduling: &spot"),
    Mistake(machines.check, GCP, "machineType:", "machineTyp:", "unknown field"),
    Mistake(machines.check, GCP, "diskSizeGb: 120", "diskSizeGb: [120]", "is to be string", "initializeParams"),
    Mistake(kubernetes.check, f"{BASE}/rayservice.yaml", "maxReplicas: 16", "maxReplica: 16", "unknown key"),
    Mistake(kubernetes.check, f"{BASE}/rayservice.yaml", "type: NewCluster", "type: Rolling", "none of None"),
    Mistake(kubernetes.check, f"{BASE}/rayservice.yaml", "version: v2", "version: v3", "'v3' is not one"),
    Mistake(kubernetes.check, f"{BASE}/rayservice.yaml", "image: talkray-gpu", "imagee: talkray-gpu", "imagee"),
    Mistake(
        kubernetes.check, f"{BASE}/rayservice.yaml", 'num-cpus: "0"', 'num-cpus: "4"', "on the head", "rayStartParams"
    ),
    Mistake(
        kubernetes.check,
        f"{BASE}/rayservice.yaml",
        '        num-cpus: "0"',
        '        num-cpus: "0"\n        redis-password: x',
        "gcsFaultToleranceOptions",
        "redis-password",
    ),
    Mistake(kubernetes.check, f"{BASE}/rayservice.yaml", "rayVersion: 2.60.0", "rayVersion: 2.59.0", "the image has"),
    Mistake(kubernetes.check, f"{BASE}/rayservice.yaml", "exec $KUBERAY", "$KUBERAY", "lacks eval", "args: &args"),
    Mistake(kubernetes.check, f"{BASE}/rayservice.yaml", "mode: token", "mode: disabled", "is to be token"),
    Mistake(kubernetes.check, f"{BASE}/network-policy.yaml", "podSelector:", "podSelectr:", "unknown key"),
    Mistake(kubernetes.check, f"{BASE}/disruption.yaml", "talkray/pool: codec", "talkray/pool: codecs", "no pod has"),
    Mistake(kubernetes.check, f"{BASE}/monitoring.yaml", "port: haproxy", "port: proxy", "no container has"),
    Mistake(
        kubernetes.check, f"{SMALL}/ingress.yaml", "name: talkray-serve-svc", "name: talkray", "service is", "service:"
    ),
    Mistake(kubernetes.check, f"{SMALL}/ingress.yaml", "pathType: Prefix", "pathTyp: Prefix", "unknown key"),
    Mistake(kubernetes.check, f"{SMALL}/kustomization.yaml", "ingress.yaml", "ingres.yaml", "kustomize", "# A node"),
    Mistake(
        kubernetes.check, f"{SMALL}/kustomization.yaml", "/2/maxReplicas, value: 3", "/2/maxReplicas, value: 1", "less"
    ),
    Mistake(hosts.check, DOCKERFILE, "USER 1000", "USER 0", "root"),
    Mistake(hosts.check, DOCKERFILE, "python:3.11-slim-bookworm", "python:latest", "no version"),
    Mistake(hosts.check, DOCKERFILE, "COPY loadtest", "COPY loadtests", "there is no"),
    Mistake(hosts.check, DOCKERFILE, "HEALTHCHECK", "# HEALTHCHECK", "HEALTHCHECK", "# Talkray"),
    Mistake(hosts.check, COMPOSE, "    restart: on-failure", "    restrt: on-failure", "unknown key"),
    Mistake(hosts.check, COMPOSE, "--keys", "--key", "has no option --key"),
    Mistake(hosts.check, COMPOSE, "grafana/grafana:11.4.0", "grafana/grafana:latest", "no version"),
    Mistake(hosts.check, COMPOSE, "../monitoring/alerts.yaml", "../monitoring/alert.yaml", "there is no"),
    Mistake(hosts.check, COMPOSE, "127.0.0.1:9090:9090", "9090:9090", "open to everybody"),
    Mistake(hosts.check, UNIT, "KillMode=mixed", "KillMode=process", "is to be mixed"),
    Mistake(hosts.check, UNIT, "talkray serve --host", "talkray serve --hots", "has no option --hots"),
    Mistake(monitoring.check, ALERTS, "ray_talkray_refusals_total", "ray_talkray_refusal_total", "no metric"),
    Mistake(monitoring.check, ALERTS, "annotations:", "annotation:", "unknown key"),
    Mistake(
        monitoring.check,
        "cluster/monitoring/grafana-dashboard.json",
        "ray_talkray_ttfb_seconds_bucket",
        "ray_talkray_ttfb_seconds_buckets",
        "no metric",
    ),
    Mistake(monitoring.check, "cluster/compose/prometheus.yaml", "[alerts.yaml]", "[alert.yaml]", "there is no"),
    Mistake(
        flavours.check, f"{BASE}/rayservice.yaml", "idleTimeoutSeconds: 360", "idleTimeoutSeconds: 400", "in aws.yaml"
    ),
    Mistake(flavours.check, GCP, "priority: 10", "priority: 11", "11 here, and 10"),
    Mistake(flavours.check, AWS, "max_workers: 33", "max_workers: 10", "of codec_pool", "codec:\n    resources"),
    Mistake(flavours.check, AWS, "{CPU: 16}", "{CPU: 1}", "0 replicas of codec_pool", "codec-spot:"),
    Mistake(flavours.check, AWS, "talkray:0.2.0-gpu", "talkray:0.0.9-gpu", "not this version"),
    Mistake(
        flavours.check,
        GCP,
        "hf download Qwen/Qwen3-TTS-12Hz-1.7B",
        "hf download Qwen/Qwen3-TTS-12Hz-0.6B",
        "is to have",
        "worker_setup",
    ),
    Mistake(
        timeouts.check,
        PRODUCTION,
        "  port: 8000",
        "  port: 8000\n  request_timeout_s: 60",
        "not more",
        "request_timeout",
    ),
    Mistake(
        timeouts.check,
        PRODUCTION,
        "    import_path:",
        "    deployments:\n      - name: Ingress\n        graceful_shutdown_timeout_s: 60\n    import_path:",
        "less than the longest stream",
        "graceful_shutdown",
    ),
    Mistake(timeouts.check, AWS, "--stop-timeout 660", "--stop-timeout 60", "to be more than", "run_options:"),
    Mistake(timeouts.check, AWS, "idle_timeout_s: 600", "idle_timeout_s: 60", "less than the 300 s"),
    Mistake(
        timeouts.check, f"{BASE}/rayservice.yaml", "PeriodSeconds: 660", "PeriodSeconds: 640", "not more than preStop"
    ),
    Mistake(
        timeouts.check, f"{BASE}/rayservice.yaml", "DelaySeconds: 720", "DelaySeconds: 60", "not more than the drain"
    ),
    Mistake(
        timeouts.check, f"{SMALL}/ingress.yaml", 'proxy-read-timeout: "3600"', 'proxy-read-timeout: "60"', "silent"
    ),
    Mistake(timeouts.check, f"{LARGE}/gateway.yaml", "request: 0s", "request: 10s", "is to be 0s"),
    Mistake(timeouts.check, UNIT, "TimeoutStopSec=30", "TimeoutStopSec=5", "may take"),
    Mistake(timeouts.check, COMPOSE, "stop_grace_period: 30s", "stop_grace_period: 5s", "may take"),
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the checks read, to be spoilt."""
    for name in READ:
        source, copy = ROOT / name, tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("secrets"))
        else:
            shutil.copy(source, copy)
    for name in ("serve_app", "deployments", "loadtest", "tools/talkray_tools"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_refused_with_file_and_line(checkout: Path, mistake: Mistake) -> None:
    file = checkout / mistake.file
    text = file.read_text(encoding="utf-8")
    assert mistake.right in text
    spoilt = text.replace(mistake.right, mistake.wrong, 1)
    file.write_text(spoilt, encoding="utf-8")
    changed = text.index(mistake.right)
    begins = changed if mistake.at is None else _near(spoilt, mistake.at, changed)
    line = spoilt.count("\n", 0, begins) + 1
    found = faults(checkout, mistake.check)
    assert [each for each in found if each.file == file and each.line == line and mistake.says in each.message], found


def _near(text: str, wanted: str, position: int) -> int:
    """Where `wanted` begins, before the position if it is there at all."""
    before = text.rfind(wanted, 0, position + len(wanted))
    return before if before >= 0 else text.index(wanted)


def test_the_checkout_has_no_fault(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(checkout) == 0
    assert capsys.readouterr().out.count(": ok") == len(CHECKS)


def test_a_fault_ends_with_status_one_and_its_line(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit = checkout / UNIT
    unit.write_text(unit.read_text(encoding="utf-8").replace("KillMode=mixed", "KillMode=none"), encoding="utf-8")
    assert main(checkout) == 1
    assert f"{unit}:" in capsys.readouterr().out


def test_a_machine_without_kustomize_is_told_so(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    [fault] = faults(checkout, kubernetes.check)
    assert isinstance(fault, Fault)
    assert "install kubectl" in fault.message
