"""Text normalization: markup, lexicon, numbers in words, languages, and sentence splitting."""
