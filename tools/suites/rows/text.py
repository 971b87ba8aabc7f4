"""Markup: no request here returns speech."""

from tools.suites.row import Rows

ROWS = Rows(storing=["/v1/audio/text"])
