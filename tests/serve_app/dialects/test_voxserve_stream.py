"""Every request may reach another ingress replica, as behind a proxy."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from deployments import mailbox
from deployments.errors import TalkerLost
from serve_app.api import create_api
from serve_app.config import AccessSettings, ApiSettings
from serve_app.keys import create_key
from serve_app.live_text import LiveTexts
from serve_app.posted_text import PostedTexts, draw_secret
from tests.serve_app import asgi
from tests.serve_app.fake import BASE, FakeSynthesizer, pcm_of, utterance

pytestmark = pytest.mark.anyio

PATH = "/generate/stream"


class Cluster:
    """Ingress replicas of one application; each request goes to the next one."""

    def __init__(self, synthesizer: FakeSynthesizer, settings: ApiSettings, *, num_replicas: int) -> None:
        secret, self.texts = draw_secret(), [LiveTexts() for _ in range(num_replicas)]
        self.replicas = [
            create_api(synthesizer, settings, live_texts=texts, posted_texts=PostedTexts(texts.server, secret))
            for texts in self.texts
        ]
        self.num_requests = 0

    def next(self) -> httpx.ASGITransport:
        self.num_requests += 1
        return httpx.ASGITransport(self.replicas[self.num_requests % len(self.replicas)])

    async def ask(self, method: str, path: str, **arguments: object) -> httpx.Response:
        async with httpx.AsyncClient(transport=self.next(), base_url="http://talkray") as client:
            return await client.request(method, PATH + path, **arguments)  # type: ignore[arg-type]

    async def start(self, **arguments: object) -> str:
        answer = await self.ask("POST", "/start", **arguments)
        assert answer.status_code == 200, answer.text
        request_id: str = answer.json()["request_id"]
        return request_id


@asynccontextmanager
async def cluster_of(
    synthesizer: FakeSynthesizer, settings: ApiSettings | None = None, *, num_replicas: int = 3
) -> AsyncIterator[Cluster]:
    cluster = Cluster(synthesizer, settings or ApiSettings(), num_replicas=num_replicas)
    yield cluster
    for texts in cluster.texts:
        await texts.aclose()


@pytest.fixture
async def cluster(synthesizer: FakeSynthesizer) -> AsyncIterator[Cluster]:
    async with cluster_of(synthesizer) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_DELAYS_S", (0.001,))


def error(answer: httpx.Response) -> tuple[int, str, str]:
    told = answer.json()["error"]
    return answer.status_code, told["code"], told["param"]


async def test_a_text_is_heard_while_it_is_written(cluster: Cluster, synthesizer: FakeSynthesizer) -> None:
    started = await cluster.ask("POST", "/start", data={"speaker": "Ryan", "language": "German", "instruct": "Softly."})
    assert "x-ignored" not in started.headers
    request_id = started.json()["request_id"]
    hearing = asyncio.create_task(cluster.ask("GET", f"/{request_id}/audio"))
    for form in ({"data": {"text": "Hello "}}, {"files": {"text": (None, "there, ")}}, {"json": {"text": "all."}}):
        answer = await cluster.ask("POST", f"/{request_id}/text", **form)
        assert answer.json() == {"status": "accepted", "request_id": request_id}
    ended = await cluster.ask("POST", f"/{request_id}/end")
    assert ended.json() == {"status": "completed", "request_id": request_id}
    answer = await hearing
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
    assert answer.content[44:] == pcm_of(utterance())
    assert int.from_bytes(answer.content[40:44], "little") == 0xFFFFFFFF
    [request] = synthesizer.requests
    assert (request.voice, request.language, request.instructions) == ("ryan", "german", "Softly.")
    assert synthesizer.texts == ["Hello there, all."]


async def test_a_text_that_is_complete_before_it_is_heard(cluster: Cluster, synthesizer: FakeSynthesizer) -> None:
    request_id = await cluster.start()
    await cluster.ask("POST", f"/{request_id}/text", data={"text": "漢字 🙂 all of it."})
    await cluster.ask("POST", f"/{request_id}/end")
    answer = await cluster.ask("GET", f"/{request_id}/audio")
    assert answer.content[44:] == pcm_of(utterance())
    assert synthesizer.texts == ["漢字 🙂 all of it."]


async def test_a_stream_without_a_text_is_an_empty_file(cluster: Cluster, synthesizer: FakeSynthesizer) -> None:
    request_id = await cluster.start()
    await cluster.ask("POST", f"/{request_id}/end")
    answer = await cluster.ask("GET", f"/{request_id}/audio")
    assert (answer.status_code, answer.content[:4], len(answer.content)) == (200, b"RIFF", 44)
    assert not synthesizer.requests


async def test_the_answer_begins_before_there_is_a_text(cluster: Cluster, synthesizer: FakeSynthesizer) -> None:
    request_id = await cluster.start()
    hearing = asgi.http(cluster.replicas[0], "GET", f"{PATH}/{request_id}/audio", body={})
    async with asyncio.timeout(30), hearing:
        assert (await hearing.next())["status"] == 200
        await cluster.ask("POST", f"/{request_id}/text", data={"text": "Hello there."})
        await hearing.next()
        hearing.receive({"type": "http.disconnect"})
        await asyncio.wait((hearing.task,))
    assert not synthesizer.requests or synthesizer.closed.is_set()


async def test_what_comes_too_late(cluster: Cluster) -> None:
    request_id = await cluster.start()
    hearing = asyncio.create_task(cluster.ask("GET", f"/{request_id}/audio"))
    await cluster.ask("POST", f"/{request_id}/text", data={"text": "Hello."})
    assert error(await cluster.ask("GET", f"/{request_id}/audio")) == (409, "audio_taken", "request_id")
    await cluster.ask("POST", f"/{request_id}/end")
    assert error(await cluster.ask("POST", f"/{request_id}/text", data={"text": "More."}))[:2] == (409, "text_ended")
    assert (await cluster.ask("POST", f"/{request_id}/end")).status_code == 200
    await hearing


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        ("/start", b"x_vector_only_mode=perhaps", "x_vector_only_mode"),
        ("/start", b"&".join([b"speaker=a"] * 40), None),
        ("/{}/text", b"", "text"),
        ("/{}/text", b"words=Hello", "text"),
        ("/{}/text", b"text=" + b"a" * 65_537, "text"),
    ],
)
async def test_what_is_refused(cluster: Cluster, path: str, content: bytes, param: str | None) -> None:
    request_id = await cluster.start()
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = await cluster.ask("POST", path.format(request_id), content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_text_becomes_no_longer_than_that_of_a_socket(cluster: Cluster) -> None:
    request_id = await cluster.start()
    assert (await cluster.ask("POST", f"/{request_id}/text", data={"text": "a" * 65_000})).status_code == 200
    answer = await cluster.ask("POST", f"/{request_id}/text", data={"text": "a" * 600})
    assert error(answer) == (400, "string_above_max_length", "text")
    assert (await cluster.ask("POST", f"/{request_id}/text", data={"text": "a" * 500})).status_code == 200


async def test_a_recording_is_asked_for_at_the_start() -> None:
    async with cluster_of(FakeSynthesizer(BASE, utterance())) as cluster:
        assert error(await cluster.ask("POST", "/start"))[2] == "ref_audio"
        answer = await cluster.ask("POST", "/start", data={"ref_text": "La."}, files={"audio": ("a.wav", b"nonsense")})
        assert error(answer)[2] == "ref_audio"


async def test_what_has_no_effect_is_named(cluster: Cluster) -> None:
    started = await cluster.ask("POST", "/start", data={"text": "Hello.", "speaker": "nobody"})
    assert {part.split()[0] for part in started.headers["x-ignored"].split("; ")} == {"text", "speaker"}
    request_id = started.json()["request_id"]
    written = await cluster.ask("POST", f"/{request_id}/text", data={"text": "Hello.", "speaker": "ryan"})
    ended = await cluster.ask("POST", f"/{request_id}/end", data={"text": "More."})
    heard = await cluster.ask("GET", f"/{request_id}/audio", params={"speaker": "ryan"})
    assert [answer.headers["x-ignored"].split(" (")[0] for answer in (written, ended)] == ["speaker", "text"]
    assert {part.split()[0] for part in heard.headers["x-ignored"].split("; ")} == {"speaker"}


async def test_nobody_else_s_id_opens_anything(cluster: Cluster) -> None:
    request_id = await cluster.start()
    name, _, signature = request_id.partition(".")
    address = base64.urlsafe_b64encode(b"127.0.0.1 6379 token").decode().rstrip("=")
    for other in ("x", "ü", f"{name}.", f"{name}.{signature[:-1]}", f"{address}.{signature}", f".{signature}"):
        for method, path in (("POST", "text"), ("GET", "audio"), ("POST", "end")):
            answer = await cluster.ask(method, f"/{other}/{path}", data={"text": "Hi."} if path == "text" else None)
            assert error(answer) == (404, "not_found", "request_id")


async def test_a_replica_of_another_application_knows_nothing_of_it(
    cluster: Cluster, synthesizer: FakeSynthesizer
) -> None:
    async with cluster_of(synthesizer) as other:
        assert (await other.ask("GET", f"/{await cluster.start()}/audio")).status_code == 404


async def test_a_text_is_of_its_key(synthesizer: FakeSynthesizer, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    mine, another = ({"xi-api-key": create_key(file, name)} for name in ("ada", "bob"))
    async with cluster_of(synthesizer, ApiSettings(access=AccessSettings(keys_file=file))) as cluster:
        request_id = await cluster.start(headers=mine)
        assert error(await cluster.ask("POST", f"/{request_id}/end", headers=another))[0] == 404
        assert (await cluster.ask("POST", f"/{request_id}/end")).status_code == 401
        assert (await cluster.ask("POST", f"/{request_id}/end", headers=mine)).status_code == 200


async def test_writing_counts_as_nothing_and_hearing_as_a_stream(synthesizer: FakeSynthesizer, tmp_path: Path) -> None:
    """Besides the start and the utterance, which are a request each; as is the start that is refused."""
    file = tmp_path / "keys.json"
    key = {"xi-api-key": create_key(file, "ada", requests_per_minute=3, max_streams=1)}
    async with cluster_of(synthesizer, ApiSettings(access=AccessSettings(keys_file=file)), num_replicas=1) as cluster:
        request_id = await cluster.start(headers=key)
        async with asgi.http(cluster.replicas[0], "GET", f"{PATH}/{request_id}/audio", headers=key) as hearing:
            assert (await hearing.next())["status"] == 200
            assert (await cluster.ask("POST", "/start", headers=key)).status_code == 429
            for word in ["Hello ", "there, ", "all ", "of ", "you."]:
                written = await cluster.ask("POST", f"/{request_id}/text", data={"text": word}, headers=key)
                assert written.status_code == 200
            assert (await cluster.ask("POST", f"/{request_id}/end", headers=key)).status_code == 200
            await hearing.task
    assert synthesizer.texts == ["Hello there, all of you."]


async def test_what_fails_breaks_the_answer_off() -> None:
    """Behind its begin, never with a clean end."""
    async with cluster_of(FakeSynthesizer(script=[*utterance()[:1], TalkerLost("lost")])) as cluster:
        request_id = await cluster.start()
        await cluster.ask("POST", f"/{request_id}/text", data={"text": "Hello there."})
        await cluster.ask("POST", f"/{request_id}/end")
        with pytest.raises(RuntimeError) as broken:
            await cluster.ask("GET", f"/{request_id}/audio")
    assert isinstance(broken.value.__cause__, TalkerLost)


async def test_the_replica_that_keeps_a_text_dies(cluster: Cluster, synthesizer: FakeSynthesizer) -> None:
    """What was written is spoken, then the answer breaks off; who writes is told."""
    request_id = await cluster.start()
    keeper = cluster.texts[cluster.num_requests % len(cluster.texts)]
    hearing = asyncio.create_task(cluster.ask("GET", f"/{request_id}/audio"))
    await cluster.ask("POST", f"/{request_id}/text", data={"text": "Hello there, "})
    while not synthesizer.requests:  # noqa: ASYNC110, it tells nobody
        await asyncio.sleep(0.01)
    await keeper.aclose()
    assert error(await cluster.ask("POST", f"/{request_id}/text", data={"text": "all."}))[:2] == (503, "replica_lost")
    with pytest.raises(RuntimeError) as broken:
        await hearing
    assert isinstance(broken.value.__cause__, TalkerLost)
    assert synthesizer.texts == ["Hello there,"]
