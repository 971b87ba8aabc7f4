"""Arguments that several commands take."""

import argparse
import sys
from pathlib import Path

from deployments.errors import CheckpointError
from deployments.model_store import locate


def checkpoint(name: str) -> Path:
    """Its directory, as of `talkray serve --model`; a download says how far it is. For argparse's `type`."""
    try:
        return locate(name, report=_say)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _say(transfer: object) -> None:
    sys.stderr.write(f"{transfer}\n")
