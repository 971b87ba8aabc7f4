"""The built-in extensions. `Dialect` says what their order decides.

Each name is a folder here, whose `extension.py` declares an `EXTENSION`. A process imports only those that it loads.
COMMANDS are groups of the command line: the help, and the Typer app that is imported when one of them is called.
"""

BUILT_IN = (
    "text",
    "deepgram",
    "elevenlabs",
    "cartesia",
    "realtime",
    "dashscope",
    "designs",  # before voices, for which `design` would be the name of a voice
    "voices",
    "other_servers",
    "native",
    "jobs",
)
COMMANDS = {
    "voice": (
        "Check recordings; store, show, move and delete voices to clone.",
        "serve_app.extensions.designs.design_commands:voices",
    ),
    "lexicon": ("How words are said, for every request.", "serve_app.extensions.voices.lexicon_commands:lexicon"),
}
