"""A black-box load test for speech servers."""
