"""How other services are asked for speech: one file for each family of clients, adapters of `SpeechService` and `Session`."""
