"""The `talkray` command, and `python -m serve_app`: at Ctrl-C it ends without a traceback, also while it is loaded."""

import signal


def main() -> None:
    """Until there is code that answers a Ctrl-C, and once there is none any more, it simply ends the process."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from serve_app.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    try:
        run()
    except KeyboardInterrupt:  # also outside of typer
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending


if __name__ == "__main__":
    main()
