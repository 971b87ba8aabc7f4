from dataclasses import replace

import pytest

from loadtest.metrics import Limits, distribution, outcome, rate_per_s, summarize, time_to_recover
from loadtest.traces import Failure, PcmLayout, Trace

RATE = 1000

# One second of audio in two chunks, audible 20 ms into it, sent 10 ms late.
SPOKEN = Trace(
    index=0, planned_s=1.0, sent_s=1.01, finished_s=1.51, first_byte_s=1.1, status=200, failure=None,
    error=None, request_id="r0", retry_after_s=None, num_bytes=2000, layout=PcmLayout(RATE), audible_sample=20,
    chunks=[(1.1, 200), (1.3, 2000)],
)  # fmt: skip


def failed(failure: Failure, status: int | None) -> Trace:
    return replace(SPOKEN, failure=failure, status=status, error="no", layout=None, audible_sample=None, chunks=[])


def test_percentiles_of_a_hundred_and_one_numbers() -> None:
    values = distribution([float(value) for value in range(101)])
    assert values is not None
    assert (values.count, values.mean, values.p50, values.p90, values.p95, values.p99, values.max) == (
        (101, 50, 50, 90, 95, 99, 100)
    )
    assert distribution([]) is None


def test_a_rate_counts_gaps() -> None:
    assert rate_per_s([0.0, 0.5, 1.0]) == 2.0
    assert rate_per_s([1.0]) is None


def test_latencies_count_from_the_plan() -> None:
    summary = summarize([SPOKEN], planned=1)
    latencies = summary.ttfb_s, summary.ttfp_s, summary.ttfa_s
    assert [each and each.p50 for each in latencies] == pytest.approx([0.1, 0.1, 0.12])


def test_audio_rates_and_playback() -> None:
    summary = summarize([SPOKEN, replace(SPOKEN, chunks=((1.1, 200), (1.15, 2000)))], planned=2)
    assert summary.rtf
    assert summary.rtf.p50 == pytest.approx(0.5)
    assert summary.audio_s == 2.0
    assert summary.audio_s_per_s == pytest.approx(2.0 / 0.51)
    assert (summary.underruns, summary.with_underrun) == (1, 1)
    assert (summary.chunk_viability, summary.request_viability) == (0.75, 0.5)
    assert summary.stall_s
    assert summary.stall_s.max == pytest.approx(0.1)


def test_failures_are_counted_by_cause_and_kept_out_of_the_latencies() -> None:
    traces = [
        SPOKEN, failed(Failure.REFUSED, 429), failed(Failure.HTTP, 500), failed(Failure.HTTP, 500),
        failed(Failure.CONNECTION, None), failed(Failure.INTERRUPTED, None),
    ]  # fmt: skip
    summary = summarize(traces, planned=9)
    assert (summary.planned, summary.sent, summary.succeeded) == (9, 6, 1)
    assert (summary.refused, summary.failed, summary.interrupted) == (1, 3, 1)
    assert summary.causes == {"HTTP 500": 2, "HTTP 429": 1, "no connection": 1, "interrupted": 1}
    assert summary.ttfb_s
    assert summary.ttfb_s.count == 1


def test_a_slow_client_is_called_slow() -> None:
    assert not summarize([SPOKEN] * 100, planned=100).client_was_slow
    late = replace(SPOKEN, sent_s=1.06)
    assert summarize([SPOKEN] * 90 + [late] * 10, planned=100).client_was_slow


def test_silence_is_reported_and_has_no_ttfa() -> None:
    summary = summarize([SPOKEN, replace(SPOKEN, audible_sample=None)], planned=2)
    assert summary.silent_answers == 1
    assert summary.ttfa_s
    assert summary.ttfa_s.count == 1


def test_an_empty_run_has_a_summary() -> None:
    summary = summarize([], planned=3)
    assert (summary.sent, summary.rtf, summary.request_viability, summary.client_was_slow) == (0, None, None, False)


def test_half_a_sample_is_not_playable() -> None:
    trace = replace(SPOKEN, chunks=((1.1, 1), (1.2, 2), (1.3, 3), (1.4, 6)))
    assert (trace.playable, trace.first_playable_s) == (([1.2, 1.4], [1, 3]), 1.2)


def test_goodput_counts_requests_within_every_limit_over_the_time_they_were_due() -> None:
    slow = replace(SPOKEN, first_byte_s=1.6)
    traces = [SPOKEN, slow, failed(Failure.REFUSED, 429)]
    summary = summarize(traces, planned=3, offered_per_s=1.5, limits=Limits(ttfb_s=0.5, stall_s=0.2))
    assert (summary.good, summary.good_per_s, summary.good_share) == (1, 0.5, 1 / 3)


@pytest.mark.parametrize(("limits", "met"), [
    (Limits(ttfb_s=0.11, stall_s=0.11), True), (Limits(ttfb_s=0.09, stall_s=0.11), False),
    (Limits(ttfb_s=0.11, stall_s=0.09), False), (Limits(stall_s=1.0, ttfa_s=0.13), True),
    (Limits(stall_s=1.0, ttfa_s=0.11), False),  # it is audible 120 ms after the plan
])  # fmt: skip
def test_a_limit_holds_from_the_planned_arrival(limits: Limits, met: bool) -> None:
    assert limits.met_by(replace(SPOKEN, chunks=((1.1, 200), (1.3, 2000)))) is met
    assert not Limits(stall_s=1.0, ttfa_s=0.13).met_by(replace(SPOKEN, audible_sample=None))
    assert "TTFA at most 110 ms" in str(Limits(ttfa_s=0.11))


def test_refusals_with_advice_are_counted() -> None:
    refused = failed(Failure.REFUSED, 429)
    summary = summarize([refused, replace(refused, retry_after_s=2.0)], planned=2)
    assert (summary.refused, summary.refused_with_advice) == (2, 1)


def test_audio_counts_as_in_time_by_its_planned_length() -> None:
    smooth = replace(SPOKEN, chunks=((1.1, 2000),), frames=25)
    late, broken = replace(SPOKEN, frames=50), replace(failed(Failure.TIMEOUT, None), frames=25)
    summary = summarize([smooth, late, broken], planned=3)
    assert (summary.succeeded, summary.with_underrun, summary.failed) == (2, 1, 1)
    assert (summary.planned_audio_s, summary.audio_in_time_share) == (8.0, 0.25)


LIMITS = Limits(ttfb_s=0.5, stall_s=1.0)


def due(planned_s: float, ttfb_s: float = 0.1) -> Trace:
    return replace(SPOKEN, planned_s=planned_s, sent_s=planned_s, first_byte_s=planned_s + ttfb_s)


def test_every_request_has_one_outcome() -> None:
    traces = [due(0.0), due(2.0, 0.9), failed(Failure.REFUSED, 429), failed(Failure.HTTP, 500)]
    assert [outcome(trace, LIMITS) for trace in traces] == ["good", "late", "refused", "failed"]


@pytest.mark.parametrize(("late", "recovered_s"), [([], 0.0), ([11], 5.0), ([11, 17], 10.0), ([29], None)])
def test_recovery_is_the_end_of_the_last_bad_window(late: list[int], recovered_s: float | None) -> None:
    traces = [due(float(second), 0.9 if second in late else 0.1) for second in range(10, 30)]
    assert time_to_recover(traces, 10.0, end_s=30.0, window_s=5.0, limits=LIMITS) == recovered_s
    assert time_to_recover([], 0.0, end_s=30.0, window_s=5.0, limits=LIMITS) == 0.0, "nothing is not bad"


def test_bad_to_the_end_is_no_recovery_whatever_the_windows() -> None:
    traces = [due(10.0 + index / 7, 0.9) for index in range(420)]
    assert time_to_recover(traces, 10.0, end_s=70.0, window_s=20 / 3, limits=LIMITS) is None


def test_continuity_counts_streams_by_all_their_underruns_together() -> None:
    stalled = [replace(SPOKEN, chunks=[(1.1, 200), (1.2 + late_s, 2000)]) for late_s in (0.0, 0.04, 0.09, 0.19, 0.3)]
    summary = summarize(stalled, planned=5)
    assert (summary.c50, summary.c100, summary.c200) == (0.4, 0.6, 0.8)
    nothing = summarize([failed(Failure.HTTP, 500)], planned=1)
    assert (nothing.c50, nothing.c100, nothing.c200) == (None, None, None)
