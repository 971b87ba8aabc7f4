"""One utterance in time: who speaks when, in which parts, and when each word sounds."""
