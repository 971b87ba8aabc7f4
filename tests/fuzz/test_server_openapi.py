"""Requests made from the OpenAPI document of a running server, and sent to it."""

import json

import pytest
import requests
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error

from tests.e2e.speech import PATH
from tests.fuzz.conftest import BOUND_S, NUM_CASES, Cases
from tests.fuzz.server import FEW_FRAMES

pytestmark = pytest.mark.fuzz

# What the document cannot say: which names are known, and that this checkpoint clones no voice.
NAMES = {
    "model": st.just("tts-1"),
    "voice": st.sampled_from(["alloy", "Vivian", {"id": "ash"}]),
    "language": st.sampled_from(["auto", "German"]),
    "response_format": st.sampled_from(["pcm", "wav"]),
    "ref_audio": st.none(),
    "ref_text": st.none(),
}
TEXTS = {
    "input": st.sampled_from(["Hello.", "a" * 300, "One. " * 500]),
    "instructions": st.just("Softly."),
}
KNOWN = st.fixed_dictionaries(NAMES, optional=TEXTS) | st.fixed_dictionaries({}, optional=NAMES | TEXTS)
BRIEF = {"max_new_tokens": FEW_FRAMES}


def test_requests_from_its_openapi_document(server: str, cases: Cases) -> None:
    schema = schemathesis.openapi.from_url(f"{server}/openapi.json")
    speech = next(operation.ok() for operation in schema.get_all_operations() if operation.ok().label == f"POST {PATH}")
    allowed, others = (speech.as_strategy(mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE))

    @settings(settings.get_profile("fuzz"), max_examples=NUM_CASES)
    @given(case=allowed | allowed | others, known=KNOWN, brief=st.sampled_from([BRIEF] * 19 + [{}]))
    def ask(case: Case, known: dict[str, object], brief: dict[str, object]) -> None:
        if isinstance(case.body, dict):
            case.body = {**case.body, **known, **brief}
        answer = case.call_and_validate(base_url=server, session=session, checks=[not_a_server_error], timeout=BOUND_S)
        cases.count(answer.status_code)
        if answer.status_code >= 400:
            assert set(json.loads(answer.content)["error"]) == {"message", "type", "param", "code"}

    with requests.Session() as session:
        ask()
