"""Whether speech is heard as it was written: recognisers, and what can be measured of a beginning, a joint, an end."""
