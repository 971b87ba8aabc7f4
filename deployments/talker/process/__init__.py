"""The engine as a process of its own: its client in the replica, their messages, its loop."""
