"""Audiobooks: from an EPUB, a text or a Markdown file to one file of audio, made by the jobs of a running server."""
