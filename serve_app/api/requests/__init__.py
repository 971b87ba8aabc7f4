"""From the fields of a body to a `SpeechRequest`, and from that to an utterance for the replicas."""
