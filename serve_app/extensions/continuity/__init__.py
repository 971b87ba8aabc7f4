"""`previous_request_id`, dialogues, and segments that continue each other's voice and pace."""
