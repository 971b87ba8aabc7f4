"""From a text to a sequence: its tokens, its prompt, and how far speech has come in it."""
