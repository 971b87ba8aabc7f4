"""Commands that replicas do not need. They ship with the wheel."""
