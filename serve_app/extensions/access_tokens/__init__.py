"""Access tokens: short-lived credentials for browsers and apps, which an API key issues."""
