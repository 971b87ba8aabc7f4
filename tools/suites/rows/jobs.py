"""Jobs."""

from tools.suites.row import Owned, Rows

ROWS = Rows(owned={"job_id": Owned("/v1/audio/jobs", {"voice": "mine", "inputs": [{"input": "One."}]})})
