"""The HTTP surface: which clients may ask, what a request means, how it is answered."""
