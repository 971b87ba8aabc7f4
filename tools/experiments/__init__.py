"""Programs that measure a running server or break it: minutes, and no part of the tests."""
