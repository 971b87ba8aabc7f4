"""Short-lived credentials for browsers and apps, issued with an API key."""
