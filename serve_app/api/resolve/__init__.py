"""From the fields of a body to a `SpeechRequest`, and from that to an utterance for the replicas.

In the order of the steps: `field_names.py` and `speech_body.py` give the fields our names and check them,
`model_choice.py` chooses the model, `make_request.py` the voice and what is spoken of the text, `ignored_fields.py`
lists fields without effect. `speech_request.py` has the result, of which `build_utterance.py` makes the utterance.
"""
