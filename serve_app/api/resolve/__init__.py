"""Resolution of body fields into a `SpeechRequest`, and of a `SpeechRequest` into an utterance for the replicas.

`resolver.py` renames the fields (`parsing/field_names.py`), validates them (`parsing/speech_body.py`), chooses the
model and the voice (`voice.py`), reads the text, and lists the fields without effect (`ignored_fields.py`). The result
is in `speech_request.py`. `make_utterance.py` makes the utterance.
"""
