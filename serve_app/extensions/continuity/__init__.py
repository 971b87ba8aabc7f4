"""Speech that goes on from the speech before it, and dialogues."""
