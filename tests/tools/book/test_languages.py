"""A Chinese and a mixed book, as jobs for a tiny random checkpoint: which segments they are spoken in."""

import asyncio
from pathlib import Path

import pytest
import torch

from deployments.config import TalkerConfig
from deployments.protocol import ModelInfo
from deployments.weights.description import describe
from talkray_tools.book.text import Book, plain_book
from talkray_tools.random_checkpoint import SHAPES, Options, write_checkpoint
from tests.serve_app.extensions.jobs.desk import Server, Speaker

CHINESE = [f"这是书里的第{number}句话，写得不长也不短，读起来很顺口{mark}" for number, mark in enumerate("。！？" * 14)]
MIXED = [
    sentence
    for number in range(20)
    for sentence in (
        f"他说第{number}次了，我们走吧。",
        f"Then she opened door {number} and looked.",
        f"“好，{number}。”她说！",
    )
]


def book_of(title: str, sentences: list[str], joint: str) -> Book:
    """Paragraphs of seven sentences, in two chapters."""
    paragraphs = [joint.join(sentences[start : start + 7]) for start in range(0, len(sentences), 7)]
    half = len(paragraphs) // 2
    chapters = ("第一章", *paragraphs[:half]), ("第二章", *paragraphs[half:])
    return plain_book("\n\n".join(text for chapter in chapters for text in chapter), title)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(directory, SHAPES["tiny-CustomVoice"], Options(dtype=torch.float32))
    found = describe(str(directory), TalkerConfig(device="cpu"), on_gpu=False)
    assert found is not None
    return found


@pytest.mark.parametrize(("sentences", "joint"), [(CHINESE, ""), (MIXED, " ")], ids=["chinese", "mixed"])
@pytest.mark.parametrize("max_chars", [120, None])
def test_every_sentence_is_in_one_segment(
    tmp_path: Path, info: ModelInfo, sentences: list[str], joint: str, max_chars: int | None
) -> None:
    book = book_of("书", sentences, joint)
    assert [chapter.title for chapter in book.chapters] == ["第一章", "第二章"]
    texts = [paragraph.text for chapter in book.chapters for paragraph in chapter.paragraphs]
    server = Server(tmp_path / "store", Speaker(info))

    async def plan() -> list[list[str]]:
        async with server.client() as client:
            body = {"voice": info.voices[0], "language": "chinese", "inputs": [{"input": text} for text in texts]}
            answer = await client.post("/v1/audio/jobs", json={**body, "max_segment_chars": max_chars})
            assert answer.status_code == 201, answer.text
            parts = server.manager._store().plan(server.manager._works[answer.json()["id"]].job, 0).parts
            return [[segment.text for segment in part.segments] for part in parts]

    spoken = asyncio.run(plan())
    segments = [text for part in spoken for text in part]
    for sentence in sentences:
        assert sum(sentence in text for text in segments) == 1, sentence
    for text, part in zip(texts, spoken, strict=True):
        assert "".join("".join(part).split()) == "".join(text.split()), "nothing else is there, or is there twice"
    longest = max_chars or info.max_segment_chars
    assert all(0 < len(text) <= longest for text in segments)
    assert max_chars is not None or len(segments) == len(texts)
