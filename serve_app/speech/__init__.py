"""One utterance in time: admission, its segments, and the times of its words."""
