"""Text normalization: markup, lexicon, numbers written as words, languages, and sentence splitting."""
