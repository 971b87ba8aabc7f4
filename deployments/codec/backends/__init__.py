"""The codec's arithmetic on one device or another."""
