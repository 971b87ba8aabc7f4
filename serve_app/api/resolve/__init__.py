"""Resolution of body fields into a `SpeechRequest`, and of a `SpeechRequest` into an utterance for the replicas.

The steps run in this order: `field_names.py` renames the fields, and `speech_body.py` validates them. `model_choice.py`
selects the model, and `voice.py` the voice. `make_request.py` reads the text, lists the fields that have no effect, and
builds the utterance. `speech_request.py` holds the result.
"""
