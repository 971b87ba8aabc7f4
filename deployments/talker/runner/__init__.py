"""From sequences to rows of tensors: prompts, the batch's state, sampling, captured steps."""
