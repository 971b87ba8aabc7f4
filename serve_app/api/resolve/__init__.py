"""Resolution of body fields into a `SpeechRequest`, and of a `SpeechRequest` into an utterance for the replicas.

The steps run in this order: `field_names.py` renames the fields, and `speech_body.py` validates them. `model_choice.py`
selects the model. `make_request.py` selects the voice and the spoken part of the text. `ignored_fields.py` lists fields
that have no effect. `speech_request.py` holds the result, and `build_utterance.py` turns it into an utterance.
"""
