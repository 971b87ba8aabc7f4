"""How clients of other services ask for speech: a file per family, which adapts `SpeechService` and `Session`."""
