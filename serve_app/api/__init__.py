"""The HTTP surface: who may come, what a request says, how it is answered."""
