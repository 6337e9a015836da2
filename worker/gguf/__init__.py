"""GGUF files: what they say of a model, and their tensors in the names and layout of transformers' checkpoints."""
