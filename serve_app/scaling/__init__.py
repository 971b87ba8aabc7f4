"""How the pools follow their load, and what is known of them."""
