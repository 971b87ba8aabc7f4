"""Turns a text as sent into its spoken form: markup, lexicon, numbers in words, languages, sentences."""
