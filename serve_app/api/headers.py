"""Names of Talkray's own HTTP headers, in lower case. Headers used by only one dialect are in its own file."""

# Request headers.
FORWARDED_FOR_HEADER = "x-forwarded-for"
TIMING_HEADER = "x-server-timing"  # requests a Server-Timing header in the response

# Request and response headers.
REQUEST_ID_HEADER = "x-request-id"

# Response headers.
IGNORED_HEADER = "x-ignored"  # ignored fields and the reason for each
SAMPLE_RATE_HEADER = "x-sample-rate"
SEED_HEADER = "x-seed"
MODEL_HEADER = "x-model"
VOICE_HEADER = "x-voice"
CHOSEN_VOICE_HEADER = "x-talkray-voice"  # the voice used if the request does not name one
TAKE_HEADER = "x-voice-take"  # the selected recording of a stored voice
WORD_TIMES_HEADER = "x-word-times"
FINISH_HEADER = "x-finish-reason"  # only in responses that are not streamed
TOKENS_HEADER = "x-vllm-omni-{}"  # only in responses that are not streamed: token counts under vLLM-Omni's names
SOURCE_HEADER = "x-digital-source-type"  # marks speech as synthetic if disclosure is enabled
SHOULD_RETRY_HEADER = "x-should-retry"
# HAProxy does not see the `Connection` header of a response. `refusals.cfg` reads this header instead, and removes it.
CLOSE_HEADER = "x-talkray-close"

# Response headers that web pages of allowed origins may read.
EXPOSED_HEADERS = (
    REQUEST_ID_HEADER,
    SAMPLE_RATE_HEADER,
    "retry-after",
    SHOULD_RETRY_HEADER,
    TAKE_HEADER,
    WORD_TIMES_HEADER,
    FINISH_HEADER,
    SOURCE_HEADER,
    IGNORED_HEADER,
    SEED_HEADER,
    MODEL_HEADER,
    VOICE_HEADER,
    CHOSEN_VOICE_HEADER,
)

# Headers that stop proxies from buffering or caching a stream.
UNBUFFERED_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
