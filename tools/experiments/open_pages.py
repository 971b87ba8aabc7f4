"""Speech with and without open pages: `python -m tools.experiments.open_pages URL`.

Five clients ask what an open page asks: `/status` every two seconds. Rounds without and with them take turns, so that
a machine that becomes slower is slower for both. The ratio counts, not the milliseconds of this machine.
"""

import argparse
import asyncio
import statistics
import time

import aiohttp

PAGES, EVERY_S = 5, 2.0
ROUNDS, REQUESTS = 6, 10
_BODY = {"model": "qwen3-tts", "input": "Hello there.", "voice": "alloy", "response_format": "pcm"}


async def first_audio_ms(http: aiohttp.ClientSession) -> float:
    """Request sent to first bytes of audio. The rest is read."""
    began_s = time.perf_counter()
    async with http.post("v1/audio/speech", json=_BODY) as answer:
        answer.raise_for_status()
        await answer.content.readany()
        first_s = time.perf_counter() - began_s
        await answer.read()
    return first_s * 1000


async def look(http: aiohttp.ClientSession, delay_s: float) -> None:
    """As a page whose last tab is seen."""
    await asyncio.sleep(delay_s)
    while True:
        async with http.get("status") as answer:
            answer.raise_for_status()
            await answer.read()
        await asyncio.sleep(EVERY_S)


async def measure(url: str) -> tuple[list[float], list[float]]:
    """Times without and with open pages, in ms."""
    without: list[float] = []
    beside: list[float] = []
    async with aiohttp.ClientSession(url.rstrip("/") + "/") as http:
        for _ in range(3):
            await first_audio_ms(http)
        for number in range(2 * ROUNDS):
            times = beside if number % 2 else without
            delays_s = [EVERY_S * page / PAGES for page in range(PAGES)] if number % 2 else []
            pages = [asyncio.create_task(look(http, delay_s)) for delay_s in delays_s]
            for _ in range(REQUESTS):
                times.append(await first_audio_ms(http))
            for page in pages:
                page.cancel()
            ended = await asyncio.gather(*pages, return_exceptions=True)
            if failed := [each for each in ended if isinstance(each, Exception)]:
                raise failed[0]
    return without, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    without, beside = asyncio.run(measure(parser.parse_args().url))
    print(f"{'':16}{'median':>10}{'p95':>10}")
    figures = [(statistics.median(times), statistics.quantiles(times, n=20)[-1]) for times in (without, beside)]
    for name, (median, p95) in zip(("no page", f"{PAGES} open pages"), figures, strict=True):
        print(f"{name:16}{median:>7.1f} ms{p95:>7.1f} ms")
    print(f"{'ratio':16}{figures[1][0] / figures[0][0]:>10.3f}{figures[1][1] / figures[0][1]:>10.3f}")


if __name__ == "__main__":
    main()
