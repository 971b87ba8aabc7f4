"""The APIs of other servers for speech."""
