"""Request records: log lines, usage counts and OpenTelemetry spans."""
