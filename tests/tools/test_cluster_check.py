"""`make cluster-check` refuses what would fail, or do harm, on a cluster: each mistake by its file and place."""

import shutil
from pathlib import Path

import pytest

from tools.cluster_check import fleet, hosts, kubernetes, machines, serve
from tools.cluster_check.__main__ import CHECKS, Check, faults, main

ROOT = Path(__file__).parents[2]
READ = ("cluster", "serve_app/cli/one-gpu.yaml", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
PRODUCTION = "cluster/serve/production.yaml"
LARGE, SMALL = "cluster/kuberay/overlays/large", "cluster/kuberay/overlays/small"
SERVICE, POLICY = "cluster/kuberay/base/rayservice.yaml", "cluster/kuberay/base/network-policy.yaml"
AWS, GCP = "cluster/aws.yaml", "cluster/gcp.yaml"
COMPOSE, UNIT, DOCKERFILE = "cluster/compose/compose.yaml", "cluster/talkray.service", "cluster/Dockerfile"
ALERTS, DASHBOARD = "cluster/monitoring/alerts.yaml", "cluster/monitoring/grafana-dashboard.json"
PORT, CPUS = "  port: 8000", 'num-cpus: "0"'
SIZE = "        num_replicas: 2 #"
DRAIN = "        graceful_shutdown_timeout_s: {}\n" + SIZE

# `right` becomes `wrong` where it first stands; a fault has all of what is said.
MISTAKES: list[tuple[Check, str, str, str, str]] = [
    (serve.check, PRODUCTION, "max_queued_requests: 64", "max_queue: 64", "Extra inputs"),
    (serve.check, PRODUCTION, "proxy_location:", "proxy_locations:", "proxy_locations: Serve ignores this key"),
    (serve.check, PRODUCTION, "  port: 8000", "  prot: 8000", "http_options.prot: Serve ignores this key"),
    (serve.check, PRODUCTION, "app:build_app", "app:build_ap", "cannot be imported"),
    (serve.check, PRODUCTION, "keys_file: /etc/talkray/keys.json", "allowed_hosts: [a]", "talkray key create"),
    (serve.check, PRODUCTION, "initial_replicas: 16", "initial_replicas: 500", "500 is not in the range 8 to 256"),
    (serve.check, PRODUCTION, "min_replicas: 8", "min_replicas: 800", "codec_scaling"),
    (serve.check, PRODUCTION, "  talker_pool:\n", "  talker_pool:\n        replicas: 2\n", "replaces all replicas"),
    (serve.check, PRODUCTION, "sequences_per_replica: 32", "sequences_per_replica: 8", "max_num_seqs, 32"),
    (serve.check, PRODUCTION, "max_ongoing_requests: 12", "max_ongoing_requests: 9", "must be 12"),
    (serve.check, PRODUCTION, "policies:CodecPolicy", "policies:CodecPolity", "cannot be imported"),
    (serve.check, PRODUCTION, "workers: 2 ", "workers: 3 ", "is more than codec_pool.num_cpus"),
    (serve.check, PRODUCTION, "  port: 8000\n", "  port: 8000\n  port: 8001\n", "port occurs twice"),
    (serve.check, PRODUCTION, "  port: 8000", "  port: [8000", "invalid YAML"),
    (serve.check, f"{LARGE}/serve.yaml", "max_streams: 400", "max_streams: 300", "must be a copy of"),
    (serve.check, PRODUCTION, PORT, f"{PORT}\n  request_timeout_s: 60", "request_timeout_s: 60 must be greater than"),
    (serve.check, PRODUCTION, SIZE, DRAIN.format(60), "60 s is less than the longest stream"),
    (serve.check, PRODUCTION, SIZE, DRAIN.format(6000), "6000 must be less than"),
    (serve.check, PRODUCTION, "- name: Ingress", "- name: Ingres", "'Ingres' must match"),
    (machines.check, AWS, "idle_timeout_minutes:", "idle_timeout_minute:", "'idle_timeout_minute' was unexpected"),
    (machines.check, AWS, "InstanceType:", "InstanceTyp:", 'Unknown parameter in input: "InstanceTyp"'),
    (machines.check, AWS, "cluster/secrets/server #", "cluster/secrets #", "nodes do not need"),
    (machines.check, AWS, "store_role {}", "store_role {IamInstanceProfile: {Nam: x}}", "codec: Unknown parameter"),
    (machines.check, GCP, "store_role {}", "store_role {serviceAccounts: [{mail: x}]}", "codec: $.serviceAccounts[0]"),
    (machines.check, AWS, "c7i.4xlarge", "c7i.4xlarg", "codec: EC2 has no"),
    (machines.check, AWS, "VolumeSize: 120", "VolumeSize: large", "Invalid type"),
    (machines.check, AWS, "availability_zone:", "availabilty_zone:", "provider: "),
    (machines.check, AWS, "serve_app.nodes.aws.AwsNodes", "serve_app.nodes.aws.Node", "cannot be imported"),
    (machines.check, AWS, "cache_stopped_nodes: false", "cache_stopped_nodes: true", "must be False"),
    (machines.check, AWS, "{CPU: 0}", "{CPU: 4}", "head.resources: {'CPU': 4} must be"),
    (machines.check, AWS, "{CPU: 8, GPU: 1}", "{CPU: 8.5, GPU: 1}", "8.5 is not of type 'integer'"),
    (machines.check, AWS, "HttpTokens: required", "HttpTokens: optional", "HttpTokens: 'optional' must be required"),
    (machines.check, AWS, "SecurityGroupIds:", "Monitoring: {Enabled: true} #", "port 22 open to all"),
    (machines.check, AWS, "RAY_AUTH_MODE=token", "RAY_AUTH_MODE=none", "must match RAY_AUTH_MODE"),
    (machines.check, AWS, "--stop-timeout 660", "--stop-timeout 60", "must be greater than 630"),
    (machines.check, AWS, "--disable-usage-stats", "--disable-usage-stat", "no option --disable-usage-stat"),
    (machines.check, AWS, 'eval "$(talkray env)";', "", "head_start_ray_commands"),
    (machines.check, GCP, "provisioningModel: SPOT", "provisioningModel: SPOTT", "$.scheduling.provisioningModel"),
    (machines.check, GCP, "machineType:", "machineTyp:", "'machineTyp' was unexpected"),
    (machines.check, GCP, "machineType:", "machineTyp:", "machineType: None must match"),
    (machines.check, GCP, "diskSizeGb: 120", "diskSizeGb: [120]", "[120] is not of type 'string', 'integer'"),
    (kubernetes.check, SERVICE, "maxReplicas: 16", "maxReplica: 16", "'maxReplica' was unexpected"),
    (kubernetes.check, SERVICE, "type: NewCluster", "type: Rolling", "'Rolling' is not one of"),
    (kubernetes.check, SERVICE, "version: v2", "version: v3", "'v3' is not one"),
    (kubernetes.check, SERVICE, "image: talkray-gpu", "imagee: talkray-gpu", "imagee"),
    (kubernetes.check, SERVICE, 'num-cpus: "0"', 'num-cpus: "4"', "the head must not run replicas"),
    (kubernetes.check, SERVICE, CPUS, f"{CPUS}\n        redis-password: x", "gcsFaultToleranceOptions"),
    (kubernetes.check, SERVICE, "rayVersion: 2.60.0", "rayVersion: 2.59.0", "rayVersion: '2.59.0' must be 2.60"),
    (kubernetes.check, SERVICE, "exec $KUBERAY", "$KUBERAY", "talker: template.spec.containers.0.args"),
    (kubernetes.check, SERVICE, "mode: token", "mode: disabled", "'disabled' must be token"),
    (kubernetes.check, SERVICE, "market: spot}\n        min", "market: x}\n        min", "nodeSelector must equal"),
    (kubernetes.check, SERVICE, "talkray/pool: talker}\n", "talkray/pool: x}\n", "talkray/pool=talker"),
    (kubernetes.check, SERVICE, "PeriodSeconds: 660", "PeriodSeconds: 640", "640, but preStop and drain take 645"),
    (kubernetes.check, SERVICE, '[sleep, "15"]', '[wait, "15"]', "preStop must be"),
    (kubernetes.check, SERVICE, "DelaySeconds: 720", "DelaySeconds: 60", "60 must be greater than 630"),
    (kubernetes.check, POLICY, "podSelector:", "podSelectr:", "'podSelector' is a required"),
    (kubernetes.check, "cluster/kuberay/base/disruption.yaml", "pool: codec", "pool: codecs", "no pod has"),
    (kubernetes.check, "cluster/kuberay/base/monitoring.yaml", "port: haproxy", "port: proxy", "no container has"),
    (kubernetes.check, f"{SMALL}/ingress.yaml", "name: talkray-serve-svc", "name: talkray", "KubeRay's service is"),
    (kubernetes.check, f"{SMALL}/ingress.yaml", "pathType: Prefix", "pathTyp: Prefix", "pathTyp"),
    (kubernetes.check, f"{SMALL}/ingress.yaml", "v1\n", "v2\n", "Couldn't find schema for kind Ingress"),
    (kubernetes.check, f"{SMALL}/ingress.yaml", 'read-timeout: "3600"', 'read-timeout: "60"', "may be idle"),
    (kubernetes.check, f"{SMALL}/kustomization.yaml", "ingress.yaml", "ingres.yaml", "kustomize failed"),
    (kubernetes.check, f"{SMALL}/kustomization.yaml", "images:", "imagess:", "kustomize failed"),
    (kubernetes.check, f"{LARGE}/gateway.yaml", "request: 0s", "request: 10s", "'10s' must be 0s"),
    (hosts.check, DOCKERFILE, "USER 1000\n\nFROM", "USER 0\n\nFROM", "root"),
    (hosts.check, DOCKERFILE, "python:3.11-slim-bookworm", "python:latest", "needs a version tag"),
    (hosts.check, DOCKERFILE, "COPY loadtest", "COPY loadtests", "loadtests does not exist"),
    (hosts.check, DOCKERFILE, "HEALTHCHECK", "# HEALTHCHECK", "HEALTHCHECK"),
    (hosts.check, COMPOSE, "--keys", "--key", "has no option --key"),
    (hosts.check, COMPOSE, "grafana/grafana:11.4.0", "grafana/grafana:latest", "needs a version tag"),
    (hosts.check, COMPOSE, "../monitoring/alerts.yaml", "../monitoring/alert.yaml", "does not exist"),
    (hosts.check, COMPOSE, "127.0.0.1:9090:9090", "9090:9090", "open to all hosts"),
    (hosts.check, COMPOSE, "../secrets/metrics-key", "./key", "git ignores"),
    (hosts.check, COMPOSE, "source: ../secrets/server,", "source: ../secrets/server/keys.json,", "mount the folder"),
    (hosts.check, COMPOSE, "source: ../secrets/server,", "source: ../secrets,", "the server does not need"),
    (hosts.check, COMPOSE, "cap_drop: [ALL]", "secrets: [keys]", "mount the folder"),
    (hosts.check, COMPOSE, "stop_grace_period: 30s", "stop_grace_period: 5s", "may take"),
    (hosts.check, UNIT, "KillMode=mixed", "KillMode=process", "Service.KillMode: 'process' must be mixed"),
    (hosts.check, UNIT, "User=talkray", "User=root", "'root' must not match"),
    (hosts.check, UNIT, "TimeoutStopSec=30", "TimeoutStopSec=5", "may take"),
    (hosts.check, UNIT, "talkray serve --host", "talkray serve --hots", "has no option --hots"),
    (hosts.check, ALERTS, "ray_talkray_refusals_total", "ray_talkray_refusal_total", "does not exist, or"),
    (hosts.check, DASHBOARD, "ray_talkray_ttfb_seconds_bucket", "ray_talkray_ttfb_seconds_sum", "does not exist, or"),
    (hosts.check, "cluster/compose/prometheus.yaml", "[alerts.yaml]", "[alert.yaml]", "alert.yaml does not exist"),
    (fleet.check, SERVICE, "idleTimeoutSeconds: 360", "idleTimeoutSeconds: 400", "in aws.yaml"),
    (fleet.check, SERVICE, "groupName: codec-spot", "groupName: codec", "has the nodes"),
    (fleet.check, SERVICE, "Qwen3-TTS-12Hz-1.7B", "Qwen3-TTS-12Hz-0.6B", "initContainers: add hf download"),
    (fleet.check, GCP, "priority: 10", "priority: 11", "11 here, but 10"),
    (fleet.check, AWS, "min_workers: 2", "min_workers: 40", "is greater than the maximum"),
    (fleet.check, AWS, "min_workers: 2", "min_workers: 62", "less than the sum of all min_workers"),
    (fleet.check, AWS, "min_workers: 0", "min_workers: 1", "cannot guarantee a minimum"),
    (fleet.check, AWS, "market: on-demand}", "market: spot}", "node_config is not spot"),
    (fleet.check, AWS, "max_workers: 33", "max_workers: 10", "of codec_pool, not 256"),
    (fleet.check, AWS, "{CPU: 16}", "{CPU: 1}", "0 replicas of codec_pool"),
    (fleet.check, AWS, "idle_timeout_s: 600", "idle_timeout_s: 60", "less than the 300 s"),
    (fleet.check, AWS, "talkray:1.0.0rc1-gpu", "talkray:0.0.9-gpu", "not this version"),
    (fleet.check, f"{SMALL}/kustomization.yaml", "newTag: 1.0.0rc1-cpu", "newTag: 0.0.9-cpu", "not this version"),
    (fleet.check, GCP, "Qwen3-TTS-12Hz-1.7B", "Qwen3-TTS-12Hz-0.6B", "worker_setup_commands: add hf download"),
    (fleet.check, f"{SMALL}/kustomization.yaml", "/2/maxReplicas, value: 3", "/2/maxReplicas, value: 1", "maximum, 1"),
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


def spoil(file: Path, right: str, wrong: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert right in text
    file.write_text(text.replace(right, wrong, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("check", "file", "right", "wrong", "says"), MISTAKES, ids=[f"{each[1]}-{each[3]}" for each in MISTAKES]
)
def test_a_mistake_is_refused(checkout: Path, check: Check, file: str, right: str, wrong: str, says: str) -> None:
    spoil(checkout / file, right, wrong)
    found = faults(checkout, check)
    folder = "cluster/kuberay/overlays" if "kuberay" in file else file
    assert [fault for fault in found if folder in fault and says in fault], found


def test_the_checkout_has_no_fault(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(checkout) == 0
    assert capsys.readouterr().out.count(": ok") == len(CHECKS)


def test_a_fault_ends_with_status_one_and_its_file(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(checkout / UNIT, "KillMode=mixed", "KillMode=none")
    assert main(checkout) == 1
    assert f"{checkout / UNIT}:" in capsys.readouterr().out


def test_a_machine_without_kustomize_is_told_so(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    [fault] = faults(checkout, kubernetes.check)
    assert "install kubectl" in fault


@pytest.mark.parametrize("tool", ["docker", "promtool", "systemd-analyze"])
def test_an_installed_tool_is_used(tool: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / tool
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$2" = version ] && exit 0\necho "talkray.service: a fault" >&2; exit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    [fault] = faults(checkout, hosts.check)
    assert fault.startswith(tool)
    assert "a fault" in fault


def test_missing_is_named(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hosts, "missing", lambda: {"docker compose", "promtool", "systemd-analyze"})
    assert main(checkout) == 0
    assert "promtool is not installed here: its checks were skipped" in capsys.readouterr().out
