"""Designed voices."""

from tools.suites.row import Rows

ROWS = Rows(storing=["/v1/audio/voices/design"])
