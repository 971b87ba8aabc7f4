"""Agents of unmodified frameworks, driven by a scripted language model, speak ten sentences in six styles.

What is heard is the text without tags, and each sentence has the style that docs/style-tags.md predicts.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

import httpx
import numpy as np
import pytest
import soxr
import torch
from numpy.typing import NDArray

from deployments.talker.engine.startup import load_speaker_encoder
from deployments.talker.model.model_config import ModelConfig
from deployments.weights.store import locate
from talkray_tools.recogniser import Whisper, plain_words
from talkray_tools.ways import level_db, sounding
from tests.clients.environments import FOLDER, command
from tests.clients.fake_openai import fake_openai
from tests.clients.test_clients import SCRIPTS, in_order, samples
from tests.clients.texts import TEXTS
from tests.e2e.black_box import serving
from tests.serve_app.cli.test_check_client import Server
from tests.serve_app.fake import utterance
from tools.experiments.parity.ours import Ours, write_tiny
from tools.experiments.parity.run import ROOT, SEES_TOOLS, official_python
from tools.listening.joints import pitch_hz

RATE = 24000
STYLES = ("", "slow", "sad", "quiet", "fast", "calm", "slow", "excited", "fast", "quiet")
SENTENCES = [text for text in TEXTS if sum(map(text.count, ".?,")) == 1][: len(STYLES)]
WANTED = plain_words(" ".join(SENTENCES))
MANNERS = ("slow", "fast", "quiet")  # all that the embedded voice knows
# Stored as takes of one voice, which has the name of a voice of OpenAI because Pipecat sends no others.
SPEAKERS = ("hugo", "felix", "otto", "nora", "lily", "miles", "iris")
TAKES = dict(zip(("", "slow", "sad", "quiet", "fast", "calm", "excited"), SPEAKERS, strict=True))
CLONE = "verse"
EXPR, PAIR = '<expr type="expression" label="{}"/> {}', '<expr type="expression" label="{}">{}</expr>'
TAGS = {  # in the form that a voice agent's prompt asks its language model for
    ("livekit", "cartesia"): EXPR, ("livekit", "cartesia-expressive"): EXPR,
    ("livekit", "elevenlabs"): "[{}] {}", ("livekit", "openai"): PAIR,
    ("pipecat", "cartesia"): '<emotion value="{}"/> {}', ("pipecat", "elevenlabs"): "[{}] {}",
    ("pipecat", "openai"): PAIR,
}  # fmt: skip
agents = pytest.mark.parametrize(("framework", "service"), TAGS, ids=map("-".join, TAGS))
Audio = NDArray[np.float32]  # [samples] at RATE


def reply(framework: str, service: str, *, url: str, voice: str, folder: Path) -> Audio:
    tag = TAGS[framework, service]
    sentences = zip(STYLES, SENTENCES, strict=True)
    answer = " ".join(tag.format(style, text) if style else text for style, text in sentences)
    with fake_openai(answer=answer) as (language_model, _):
        order = {"url": url, "service": service, "voice": voice, "language_model": language_model}
        order |= {"texts": [], "interruptions": 0, "python": "", "folder": str(folder)}
        (folder / "order.json").write_text(json.dumps(order))
        script = command(framework, SCRIPTS / f"agent_{framework}.py")
        subprocess.run([*script, str(folder / "order.json"), str(FOLDER / framework)], check=True, timeout=240)
    audio, rate = samples(folder / "turn-0.wav")
    assert rate == RATE
    return audio


def said(url: str, **fields: str) -> bytes:
    asked = {"response_format": "pcm", **fields}
    return httpx.post(f"{url}/v1/audio/speech", json=asked, timeout=120).raise_for_status().content


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server with the embedded voice, and with a clone in seven styles."""
    folder = tmp_path_factory.mktemp("styles")
    data = {"TALKRAY_DATA": str(folder / "data")}
    with serving(folder, "--model", "embedded", "--model", "embedded-base", environment=data) as server:
        for style, speaker in TAKES.items():
            recording = said(server.url, voice=speaker, input=TEXTS[0], response_format="wav")
            path, fields = (f"/{CLONE}", {"style": style}) if style else ("", {"name": CLONE})
            files = {"audio_sample": ("take.wav", recording, "audio/wav")}
            httpx.post(f"{server.url}/v1/audio/voices{path}", data=fields, files=files, timeout=60).raise_for_status()
        yield server.url


@pytest.fixture(scope="module")
def plainly(url: str) -> Callable[[str], Audio]:
    """A sentence of the embedded voice without a tag."""
    return cache(lambda text: pcm16(said(url, voice="nora", input=text)))


def pcm16(data: bytes) -> Audio:
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


def manner(audio: Audio, plain: Audio) -> str:
    """How a sentence differs from the plain one: by half of what the embedded voice does in each manner."""
    spoken, usual = (each[slice(*sounding(each))] for each in (audio, plain))
    length, level = len(spoken) / len(usual), level_db(spoken) - level_db(usual)
    print(f"{length:.2f} of the length, {level:+.1f} dB")
    return "slow" if length > 1.2 else "fast" if length < 0.88 else "quiet" if level < -5 else ""


@pytest.fixture(scope="module")
def take(url: str) -> Callable[[Audio], str]:
    """The style of the take whose speaker is the nearest, by vector and by pitch: MP3 alone changes the vector."""
    directory = locate("embedded-base")
    encoder = load_speaker_encoder(directory, ModelConfig.load(directory), device=torch.device("cpu"))
    assert encoder is not None

    def speaker(audio: Audio) -> tuple[NDArray[np.float32], float]:
        vector: NDArray[np.float32] = encoder.embed(torch.from_numpy(audio.copy())).numpy()
        return vector / np.linalg.norm(vector), pitch_hz(audio)

    takes = {style: speaker(pcm16(said(url, voice=CLONE, input=TEXTS[2], instructions=style))) for style in TAKES}

    def nearest(audio: Audio) -> str:
        vector, pitch = speaker(audio)
        alike = {style: vector @ known - abs(np.log2(pitch / hz)) for style, (known, hz) in takes.items()}
        return max(alike, key=lambda style: float(alike[style]))

    return nearest


def heard_words(audio: Audio, ear: Whisper) -> list[tuple[str, float, float]]:
    """Each word with its beginning and its end in seconds."""
    pcm = soxr.resample(audio, RATE, 16000)
    options = {"language": "en", "word_timestamps": True, "condition_on_previous_text": False}
    segments, _ = ear._model.transcribe(pcm, **options)
    words = [word for segment in segments for word in segment.words]
    return [(plain, word.start, word.end) for word in words for plain in plain_words(word.word)]


def cut(audio: Audio, words: list[tuple[str, float, float]]) -> list[Audio]:
    """The sentences: cut at the quietest moment between the words before and behind each border."""
    matcher = SequenceMatcher(a=WANTED, b=[word for word, *_ in words], autojunk=False)
    placed = {block.a + n: block.b + n for block in matcher.get_matching_blocks() for n in range(block.size)}
    border, borders = 0, [0]
    for sentence in SENTENCES[:-1]:
        border += len(plain_words(sentence))
        before = max(n for n in placed if n < border)
        behind = min(n for n in placed if n >= border)
        begin, end = int((words[placed[before]][2] - 0.3) * RATE), int((words[placed[behind]][1] + 0.3) * RATE)
        size = RATE // 20
        levels = np.convolve(np.square(audio[begin:end]), np.ones(size), "valid")
        borders.append(begin + int(levels.argmin()) + size // 2)
    return np.split(audio, borders[1:])


@agents
def test_the_embedded_voice_speaks_each_sentence_in_its_manner(
    url: str, transcriber: Whisper, plainly: Callable[[str], Audio], tmp_path: Path, framework: str, service: str
) -> None:
    audio = reply(framework, service, url=url, voice="nora", folder=tmp_path)
    pieces = cut(audio, checked(heard_words(audio, transcriber)))
    found = [manner(piece, plainly(text)) for piece, text in zip(pieces, SENTENCES, strict=True)]
    assert found == [style if style in MANNERS else "" for style in STYLES]


@agents
def test_a_stored_voice_speaks_each_sentence_with_its_take(
    url: str, transcriber: Whisper, take: Callable[[Audio], str], tmp_path: Path, framework: str, service: str
) -> None:
    audio = reply(framework, service, url=url, voice=CLONE, folder=tmp_path)
    assert tuple(map(take, cut(audio, checked(heard_words(audio, transcriber))))) == STYLES


def checked(words: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    heard = [word for word, *_ in words]
    print(f"{in_order(WANTED, heard)} of {len(WANTED)} words, {len(heard)} heard")
    assert in_order(WANTED, heard) >= 0.95 * len(WANTED), heard
    assert not {"expr", "expression", "type", "label", "emotion", "value", *STYLES} & set(heard)
    return words


@agents
def test_the_prompts_are_the_official_packages(tmp_path: Path, framework: str, service: str) -> None:
    """Of a model that follows instructions, whose speech is played: what it would be given."""
    with Server(list(utterance(10))) as server:
        reply(framework, service, url=server.url, voice="ryan", folder=tmp_path)
        texts, requests = server.synthesizer.texts, server.synthesizer.requests
    spoken = [(request.instructions or "", text.strip()) for request, text in zip(requests, texts, strict=True)]
    assert spoken == list(zip(STYLES, SENTENCES, strict=True))
    checkpoint = write_tiny(tmp_path / "checkpoint", "custom_voice")
    streams = [request.mailbox is not None or request.non_streaming_mode is False for request in requests]
    cases = [
        {"text": text, "speaker": request.voice, "language": request.language, "instruct": style or None}
        for request, (style, text) in zip(requests, spoken, strict=True)
    ]
    cases = [{**case, "non_streaming_mode": not each} for case, each in zip(cases, streams, strict=True)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = [official_python(ROOT / ".parity"), SCRIPTS / "official_prompts.py", checkpoint, tmp_path]
    subprocess.run([str(each) for each in script], check=True, timeout=240, env=SEES_TOOLS)
    prompts = Ours(checkpoint).engine.prompts
    with np.load(tmp_path / "rows.npz") as official:
        for number, (request, streamed) in enumerate(zip(requests, streams, strict=True)):
            whole = replace(request, text=spoken[number][1], mailbox=None, non_streaming_mode=not streamed)
            made = prompts.build(whole)
            rows = prompts.tables.rows(torch.from_numpy(made.text_ids), torch.from_numpy(made.codec_ids))
            np.testing.assert_allclose(rows.numpy(), official[f"rows-{number}"], atol=1e-6, strict=True)
            trailing = prompts.tables.text[torch.from_numpy(made.trailing)]
            np.testing.assert_allclose(trailing.numpy(), official[f"trailing-{number}"], atol=1e-6, strict=True)
