"""Long experiments that measure or break a running server. They are not part of the tests."""
