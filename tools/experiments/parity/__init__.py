"""Comparison of Talkray with the official package (make parity), and the golden files of tests/parity."""
