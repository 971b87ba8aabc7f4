"""Measure with speech recognisers how well speech matches its text, and analyse beginnings, joints and ends."""
