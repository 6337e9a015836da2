"""Tools and reasoning: what a chat offers to the model, and what the model's text says of it."""
