"""Requests made from the OpenAPI document: every operation, with what it allows and with what it does not."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation

from deployments.protocol import ModelInfo
from tests.fuzz.conftest import BOUND_S, NUM_CASES, Cases
from tests.fuzz.recordings import originals
from tests.fuzz.test_recordings import data_url
from tests.serve_app.extensions.client import every_api
from tests.serve_app.fake import BASE, CUSTOM_VOICE, VOICE_DESIGN, FakeSynthesizer, utterance

# Hypothesis writes a failing request down, also one with a recording.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

SYNTHESIZER = FakeSynthesizer(script=utterance(1))
API = every_api(Path(tempfile.mkdtemp(dir=os.environ["TALKRAY_DATA"])), SYNTHESIZER)  # its jobs wait
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", API)
OPERATIONS = {operation.ok().label: operation.ok() for operation in SCHEMA.get_all_operations()}
SPEECH = "POST /v1/audio/speech"
NUM_EACH = {SPEECH: NUM_CASES, "GET /v1/models/{model_id}": NUM_CASES // 4}
FEW = max(5, NUM_CASES // 100)


# What the document cannot say: which names are known, and what a recording is.
NAMES: dict[str, st.SearchStrategy[object]] = {
    "model": st.just("tts-1"),
    "voice": st.sampled_from(["alloy", "Vivian", {"id": "ash"}]),
    "language": st.just("auto"),
    "ref_audio": st.sampled_from([None, data_url(originals()[0])]),
    "ref_text": st.sampled_from([None, "Hi."]),
}
OTHERS = {"instructions": st.just("Softly.")}
KNOWN = st.fixed_dictionaries(NAMES, optional=OTHERS) | st.fixed_dictionaries({}, optional=NAMES | OTHERS)


def requests(operation: APIOperation) -> st.SearchStrategy[Case]:
    allowed = operation.as_strategy(GenerationMode.POSITIVE)
    takes_input = operation.body or operation.path_parameters or operation.query
    return allowed | operation.as_strategy(GenerationMode.NEGATIVE) if takes_input else allowed


@pytest.mark.parametrize("label", OPERATIONS)
def test_operation(label: str, cases: Cases) -> None:
    known = KNOWN if label == SPEECH else st.just({}) | KNOWN
    num_cases = NUM_EACH.get(label, FEW)

    @settings(settings.get_profile("fuzz"), max_examples=num_cases)
    @given(case=requests(OPERATIONS[label]), info=st.sampled_from((CUSTOM_VOICE, VOICE_DESIGN, BASE)), known=known)
    def ask(case: Case, info: ModelInfo, known: dict[str, object]) -> None:
        if isinstance(case.body, dict):
            case.body = {**case.body, **known}
        SYNTHESIZER.info = info
        SYNTHESIZER.requests.clear()
        # Schemathesis' own limit of ten seconds fails on a busy machine, and looks like a server error.
        answer = case.call_and_validate(checks=[not_a_server_error], timeout=BOUND_S)
        cases.count(answer.status_code)
        if answer.status_code >= 400:
            assert set(json.loads(answer.content)["error"]) == {"message", "type", "param", "code"}

    ask()
