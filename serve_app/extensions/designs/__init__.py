"""Voice design: voices that clients create from a description."""
