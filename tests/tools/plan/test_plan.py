from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from deployments.errors import InvalidRequest, StartError
from loadtest.measured import MeasuredRate
from loadtest.sweep import Plan
from serve_app.config_file import read_config
from talkray_tools.plan import __main__ as command
from talkray_tools.plan import measure
from talkray_tools.plan.sizing import Demand, Sizing
from talkray_tools.plan.tables import CPU, Basis, MeasuredTable, choose, known_gpu, read_table, shipped
from tests.loadtest.servers import PeerHandler, peer_server

FAST = {5: 10.0, 50: 15.0, 95: 20.0, 99: 25.0}
TABLE = MeasuredTable(
    model="1.7B-CustomVoice", gpu="H100", cores=16, max_num_seqs=64, host="a host", date="2026-01-02", commit="abc",
    command="loadtest", weights="random", note="", rows=(
        MeasuredRate(1.0, 100, 6.0, FAST, 1.2, 3.0, 1.0),
        MeasuredRate(50.0, 900, 6.0, {p: 4 * ms for p, ms in FAST.items()}, 24.0, 6.0, 1.0),
        MeasuredRate(90.0, 900, 6.0, {p: 30 * ms for p, ms in FAST.items()}, 60.0, 9.0, 0.8, refused=9),
    ),
)  # fmt: skip


def table(model: str, gpu: str) -> MeasuredTable:
    return next(each for each in shipped() if (each.model, each.gpu) == (model, gpu))


# Rows of docs/performance.md: the requests a second that a replica carried with this p95.
MEASURED = [("1.7B-CustomVoice", "H100", 60, 47.7), ("0.6B-CustomVoice", "H100", 110, 41.2)]
MEASURED += [("1.7B-CustomVoice", "H200", 140, 41.8)]


@pytest.mark.parametrize(("model", "gpu", "rate", "p95_ms"), MEASURED)
def test_the_answer_is_within_a_fifth_of_what_was_measured(model: str, gpu: str, rate: float, p95_ms: float) -> None:
    found = table(model, gpu)
    assert any((row.rate, row.first_audio_ms[95]) == (rate, p95_ms) for row in found.rows)
    others = replace(found, rows=tuple(row for row in found.rows if row.rate != rate))
    assert Sizing(Demand(rate, 6.06, p95_ms), Basis(others), 1, 0).carried == pytest.approx(rate, rel=0.2)


def sizing(rate: float, *, p95_ms: float = 100.0, spare: int = 1, gpus: int = 1) -> Sizing:
    return Sizing(Demand(rate, 6.0, p95_ms), Basis(TABLE), gpus, spare)


def test_a_replica_is_never_asked_for_more_than_was_measured() -> None:
    assert sizing(10.0, p95_ms=5000.0).carried == pytest.approx(50.0)
    assert sizing(10.0, p95_ms=40.0).carried < 40.0


def test_audio_that_comes_more_slowly_than_it_plays_is_not_carried() -> None:
    slow = Basis(TABLE, slower=14.0, reasons=("it is slow",))  # at 24 streams a frame of 80 ms takes 84
    made = Sizing(Demand(1.0, 6.0, 60_000.0), slow, 1, 0)
    assert made.outcome(1, made.most_per_replica).late > 0.5
    assert made.carried < 0.9 * made.most_per_replica


def test_nodes_carry_the_load_and_the_spare_one_beside_them() -> None:
    made = sizing(120.0, p95_ms=5000.0, gpus=2)
    assert (made.needed, made.nodes, made.replicas, made.replicas_left) == (3, 3, 6, 4)
    assert made.outcome(made.replicas_left, 120.0).holds(made.demand)


def test_a_p95_that_no_request_can_keep_is_refused_with_what_can_be_had() -> None:
    with pytest.raises(InvalidRequest, match=r"--p95 15: p95 is \d+ ms even at 1 requests/s"):
        _ = sizing(10.0, p95_ms=15.0).carried


def test_another_gpu_is_an_estimate_by_its_memory_and_a_slower_one_carries_less() -> None:
    same, slower, faster = (
        choose([TABLE], model="1.7B-CustomVoice", gpu=name, cores=16) for name in ("H100", "NVIDIA L40S", "H200")
    )
    assert same.source.startswith("measured: a host, 2026-01-02")
    assert slower.slower == pytest.approx(3350 / 864)
    assert "estimated from a host" in slower.source
    assert "memory bandwidth" in slower.source
    assert faster.slower == 1.0
    demand = Demand(10.0, 6.0, 5000.0)
    assert Sizing(demand, slower, 1, 0).carried == pytest.approx(50.0 * 864 / 3350, rel=0.05)


@pytest.mark.parametrize(("model", "cores", "said"), [
    ("1.7B-Base", 16, "has the shape of 1.7B-CustomVoice"), ("0.6B-Base", 16, "at most as slow as 1.7B-CustomVoice"),
    ("1.7B-CustomVoice", 8, "8 cores per GPU"),
])  # fmt: skip
def test_another_model_or_fewer_cores_are_an_estimate(model: str, cores: int, said: str) -> None:
    assert said in choose([TABLE], model=model, gpu="H100", cores=cores).source


@pytest.mark.parametrize(("model", "gpu"), [("embedded", "H100"), ("1.7B-CustomVoice", CPU), ("0.6B-Base", "GTX 1080")])
def test_what_nothing_is_known_of_is_to_be_measured(model: str, gpu: str) -> None:
    with pytest.raises(InvalidRequest, match="--measure"):
        choose([TABLE], model=model, gpu=gpu, cores=16)


@pytest.mark.parametrize(
    ("said", "known"), [("NVIDIA H100 80GB HBM3", "H100"), ("l40s", "L40S"), ("NVIDIA A10G", "A10G"), ("X9", "X9")]
)
def test_a_gpu_is_known_by_what_its_driver_calls_it(said: str, known: str) -> None:
    assert known_gpu(said) == known


def test_a_table_is_written_and_read(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "t.json")
    assert read_table(tmp_path / "t.json") == TABLE
    (tmp_path / "bad.json").write_text('{"rows": 3}')
    with pytest.raises(InvalidRequest, match=r"bad\.json is not a table"):
        read_table(tmp_path / "bad.json")


def test_every_shipped_table_says_where_it_is_from() -> None:
    for each in shipped():
        assert each.host
        assert each.date.startswith("20")
        assert each.commit
        assert each.command
        assert each.highest.rate > 0


@pytest.fixture(autouse=True)
def _brief_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("talkray_tools.plan.sizing._SHORT_DAY_S", (30.0, 30.0))
    monkeypatch.setattr("talkray_tools.plan.sizing._LONGEST_S", 60.0)


def run(*arguments: str) -> int:
    return command.main(list(arguments))


def test_a_plan_marks_numbers_and_writes_what_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TABLE.write(tmp_path / "t.json")
    file = tmp_path / "plan.yaml"
    asked = ("--calls", "60", "--speaks", "0.2", "--gpu", "H100", "--cores", "16", "--price", "2")
    assert run(*asked, "--table", str(tmp_path / "t.json"), "--out", str(file)) == 0
    out = capsys.readouterr().out
    for said in (
        "2.00 requests/s", "measured: ", "simulated", "when a node dies", "holds", "4.00 per hour", "over a day",
    ):  # fmt: skip
        assert said in out
    loaded = read_config(file)
    assert (loaded.talker_pool.replicas, loaded.ingress_pool.replicas) == (2, 4)
    assert loaded.model == "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"
    assert "# nodes: 2" in file.read_text()
    document = yaml.safe_load(file.read_text())
    assert document["http_options"]["host"] == "0.0.0.0"
    sizes = {each["name"]: each["num_replicas"] for each in document["applications"][0]["deployments"]}
    assert sizes == {"Ingress": 4, "Talker": 2, "Codec": 1}
    assert loaded.api.access.keys_file is not None


def test_one_node_without_a_gpu_speaks_to_itself(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    alone = ("--rate", "0.2", "--speech-s", "4", "--model", "embedded", "--gpu", "none", "--cores", "2", "--spare", "0")
    assert run(*alone, "--out", str(file)) == 0
    loaded = read_config(file)
    assert (loaded.model, loaded.talker_pool.num_gpus) == ("embedded", 0)
    assert yaml.safe_load(file.read_text())["http_options"]["host"] == "127.0.0.1"


@pytest.mark.parametrize(("arguments", "said"), [
    ((), "--calls or --rate"), (("--rate", "1", "--calls", "1"), "either --calls or --rate"),
    (("--rate", "1", "--model", "7B"), "--model 7B: the model is unknown"),
    (("--rate", "1", "--out", str(Path(__file__))), "the file already exists"),
])  # fmt: skip
def test_no_plan_is_explained(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err


def test_a_machine_is_measured_into_a_table_that_plans_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_RATES", Plan(rates=(20.0, 40.0), duration_s=0.3))
    monkeypatch.setattr(measure, "first_voice", lambda _: "serena")
    monkeypatch.setattr(PeerHandler, "pieces", 8)
    file = tmp_path / "here.json"
    with peer_server("talkray", first_s=0.02, streams=64) as (url, bodies):
        made = measure.measure_table(file, model="0.6B-Base", gpu="L4", url=url, speech_s=0.8, p95_ms=200.0)
    assert b'"serena"' in bodies[0]
    assert read_table(file) == made
    assert [row.rate for row in made.rows] == [20.0, 40.0]
    assert made.rows[0].first_audio_ms[50] > 20.0
    assert choose([made, *shipped()], model="0.6B-Base", gpu="L4", cores=made.cores).table == made
    with pytest.raises(InvalidRequest, match="Pass it with --table"):
        measure.measure_table(file, model="0.6B-Base", gpu="L4", url=url, speech_s=0.8, p95_ms=200.0)


def test_a_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.sys, "executable", "/bin/false")
    with pytest.raises(StartError, match="did not start"), measure.serving("embedded"):
        pass
