"""Black-box load test for speech servers."""
