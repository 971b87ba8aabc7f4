"""When each word is heard."""
