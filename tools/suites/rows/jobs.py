"""Jobs."""

from tools.suites.row import Owned, Rows

ROWS = Rows(
    owned={"job_id": Owned("/v1/audio/jobs", {"voice": "mine", "inputs": [{"input": "One."}]})},
    storing=["/v1/audio/jobs", "/v1/audio/jobs/{job_id}/cancel", "/v1/audio/jobs/{job_id}/resume"],
)
