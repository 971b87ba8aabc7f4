"""The `talkray` command, also `python -m serve_app`. Ctrl-C ends it without a traceback, even during imports."""

import signal


def main() -> None:
    """Run the command. Ctrl-C ends the process immediately during imports, and is ignored once it has finished."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from serve_app.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    try:
        run()
    except KeyboardInterrupt:  # raised outside typer
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process is ending


if __name__ == "__main__":
    main()
