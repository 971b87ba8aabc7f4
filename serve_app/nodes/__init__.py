"""What clouds say of their machines."""
