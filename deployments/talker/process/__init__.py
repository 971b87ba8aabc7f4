"""Engine process: its client in the replica, its messages, and its main loop."""
