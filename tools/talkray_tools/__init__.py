"""What no replica runs, as far as the command line needs it: it ships with the wheel."""
