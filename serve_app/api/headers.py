"""Names of our own HTTP headers, in lower case. Headers of one dialect are in the dialect's file."""

# Of requests.
FORWARDED_FOR_HEADER = "x-forwarded-for"
TIMING_HEADER = "x-server-timing"  # the answer then has a Server-Timing header

# Of requests and answers.
REQUEST_ID_HEADER = "x-request-id"

# Of answers.
IGNORED_HEADER = "x-ignored"  # fields without effect, each with its reason
SAMPLE_RATE_HEADER = "x-sample-rate"
SEED_HEADER = "x-seed"
MODEL_HEADER = "x-model"
VOICE_HEADER = "x-voice"
CHOSEN_VOICE_HEADER = "x-talkray-voice"  # the voice that speaks if the request names none
TAKE_HEADER = "x-voice-take"  # which recording of a stored voice speaks
WORD_TIMES_HEADER = "x-word-times"
FINISH_HEADER = "x-finish-reason"  # of a whole answer
TOKENS_HEADER = "x-vllm-omni-{}"  # of a whole answer, in any dialect: vLLM-Omni's names of the counts
SOURCE_HEADER = "x-digital-source-type"  # of synthetic speech, if the server discloses it
SHOULD_RETRY_HEADER = "x-should-retry"
# HAProxy does not see our `Connection` header. `refusals.cfg` reads this header in its place, and removes it.
CLOSE_HEADER = "x-talkray-close"

# Response headers that a web page of an allowed origin may read.
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

# Make proxies forward parts of the answer as they arrive, and cache none.
UNBUFFERED_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
