"""What is heard in samples, and recordings that are kept."""
