"""Speech that continues earlier speech, and dialogues."""
