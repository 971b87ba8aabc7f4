"""Talkray beside the official package (make parity), and the golden files of tests/parity."""
