"""The private contract between frontends, scheduler and workers: messages, codec, channels."""
