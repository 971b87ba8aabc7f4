"""Word timestamps: the start and end of each word in the audio."""
