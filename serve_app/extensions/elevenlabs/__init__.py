"""ElevenLabs' API."""
