"""Resolution of body fields into a `SpeechRequest`, and of a `SpeechRequest` into an utterance for the replicas.

`make_request.py` runs the steps in this order: `parsing/field_names.py` renames the fields, and
`parsing/speech_body.py` validates them. `resolver.py` selects the model, and `voice.py` the voice. `resolver.py` reads
the text, and `ignored_fields.py` lists the fields that have no effect. `speech_request.py` holds the result, from which
`build_utterance` makes the utterance. Extensions replace functions of `resolver.py`.
"""
