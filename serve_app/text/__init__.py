"""From a text as it was sent to what is spoken: markup, lexicon, figures in words, languages, sentences."""
