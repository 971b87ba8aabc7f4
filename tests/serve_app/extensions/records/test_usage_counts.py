import time
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.protocol import FinishReason
from deployments.serving import metrics
from serve_app.api.request_record import LEFT, RequestRecord, Usage
from serve_app.extensions.records.usage_counts import OTHERS, Bounded, UsageBook, Used, read_usage
from serve_app.extensions.voices.voice_store import StoreFailed, VoiceStore

EIGHT = 1_793_606_400.0  # of the clock, 2026-11-02T08 in UTC


def spoken(
    key: str | None = "ada", voice: str = "ryan", error: str | None = None, samples: int = 48_000
) -> RequestRecord:
    usage = Usage(frames=25, samples=samples, finish_reason=FinishReason.STOP, model="m", voice=voice)
    return RequestRecord(
        "r", 0, key=key, dialect="OpenAI", characters=12, samples_per_s=24_000, usage=usage, error=error
    )


def summed(store: VoiceStore, since: str = "2026") -> dict[tuple[str, ...], Used]:
    found: dict[tuple[str, ...], Used] = {}
    for hour in read_usage(store, since):
        for row in hour.rows:
            found.setdefault((hour.hour, row.key, row.voice), Used()).add(row)
    return found


def test_processes_add_up_by_hour_and_a_death_loses_only_what_was_not_flushed(tmp_path: Path) -> None:
    store, now_s = VoiceStore(str(tmp_path)), [EIGHT]
    books = [UsageBook(store, lambda: now_s[0]) for _ in range(2)]
    for book in books:
        book.receive(spoken())
        book.receive(spoken(key=None, error="invalid_api_key", samples=0))
        book.flush()
        book.flush()
    books[0].receive(spoken(error=LEFT))
    now_s[0] += 3600
    books[0].receive(spoken(voice="vivian", error="engine_error"))
    books[0].flush()
    books[1].receive(spoken(voice="lost"))  # and is killed
    (tmp_path / "usage" / "2026-11-02" / ".08-aa.json.0f0f0f0f.new").write_text('{"sha')  # which was being written
    one = Used(requests=1, characters=12, audio_s=2.0, codes=25)
    assert summed(store) == {
        ("2026-11-02T08", "", "ryan"): Used(refused=2),
        ("2026-11-02T08", "ada", "ryan"): Used(requests=3, characters=36, audio_s=6.0, codes=75),
        ("2026-11-02T09", "ada", "vivian"): replace(one, failed=1),
    }
    assert set(summed(store, since="2026-11-02T09")) == {("2026-11-02T09", "ada", "vivian")}
    assert set(summed(store, since="2026-11-03")) == set()


def test_what_a_store_does_not_take_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now_s = VoiceStore(str(tmp_path)), [EIGHT]
    book = UsageBook(store, lambda: now_s[0])

    def refuse(*_: object) -> None:
        raise StoreFailed("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(store, "put_record", refuse)
        book.receive(spoken())
        book.flush()
        now_s[0] += 3600
        book.receive(spoken())
        book.flush()
    assert not summed(store)
    book.flush()
    assert [hour for hour, *_ in summed(store)] == ["2026-11-02T08", "2026-11-02T09"]


@pytest.mark.parametrize(
    ("samples", "error", "counted"),
    [
        (24000, None, Used(1, 5, audio_s=0.5, codes=12)),
        (24000, "engine_error", Used(1, 5, audio_s=0.5, codes=12, failed=1)),
        (24000, LEFT, Used(1, 5, audio_s=0.5, codes=12)),
        (0, None, Used()),
        (0, LEFT, Used()),
        (0, "invalid_value", Used(failed=1)),
        *((0, code, Used(refused=1)) for code in ("rate_limit_exceeded", "not_ready", "invalid_api_key", "forbidden")),
        (0, "headers_too_large", Used(refused=1)),
    ],
)
def test_a_request_counts_as_what_became_of_it(samples: int, error: str | None, counted: Used) -> None:
    usage = Usage(samples=samples, frames=12)
    assert Used.of(RequestRecord("r", 0, characters=5, samples_per_s=48_000, usage=usage, error=error)) == counted


def test_rows_are_bounded_and_nothing_is_left_out() -> None:
    rows, one = Bounded(4), Used(requests=1)
    for number in (*range(50), 0):
        rows.add((f"key {number % 9}", "m", f"voice {number}", "OpenAI"), one)
    assert rows.counts["key 0", "m", "voice 0", "OpenAI"].requests == 2
    assert len(rows.counts) == 7
    assert rows.counts[OTHERS, "m", OTHERS, "OpenAI"].requests > 0
    assert sum(used.requests for used in rows.counts.values()) == 51


def test_counters_have_bounded_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, str]] = []
    monkeypatch.setattr(metrics.USED["characters"], "record", lambda count, **tags: told.append(tags | {"": count}))
    book = UsageBook(None, time.time)
    for number in range(400):
        book.receive(spoken(voice=f"voice {number}"))
    assert told[0] == {"key": "ada", "voice": "voice 0", "dialect": "OpenAI", "model": "m", "": 12}
    assert {tags[""] for tags in told} == {12}, "what is new, not the sum"
    assert len({tags["voice"] for tags in told}) == 201
    assert told[-1]["voice"] == OTHERS
